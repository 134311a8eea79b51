"""Connections between the agents of a job: both sides prove that they know its secret, and nothing on the way can be changed.

secret.py    what the agents of a job share
authentication.py the proof, and the seal on each frame from then on
link.py      one connection: whole frames, sealed
session.py   messages in order and once each, over one link after another; the other side is lost when it is silent for too long
connect.py      a link to another agent; accept.py: links from others
heart.py     signs of life, also while the agent computes
addresses.py where agents listen, and what others reach this host by
"""
