"""Ranks that have a model together, a shard each, by torch's `fully_shard`.

group.py    they are torch's default group: its calls go to whoever has the other shards in this generation
measure.py  what a pass takes, when a job starts
"""
