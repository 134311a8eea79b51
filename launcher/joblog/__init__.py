"""The event log: what is written down of a job.

events.py       all that can happen, one JSON object a line
event_sink.py         what there is to tell, on its way to who decides and to the log
reader.py       a job's events, read back
registry.py     the jobs of this user on this host; owner.py: which agent of a job a folder belongs to
exit_codes.py   what `odyssey run` exits with
wording.py      how ranks are named in messages
torch_events.py the same events, for torch's recorders
"""
