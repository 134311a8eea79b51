"""What a rank and its agent say to each other.

messages.py  the messages; link.py: the rank's end of the socket
calls.py     the calls of a script that all ranks make together
trial.py     the plan of the steps that are tried when a job starts
"""
