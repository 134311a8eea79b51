"""Checkpoints: whole or not there.

checkpoint.py saved and loaded by all ranks together
shards.py     the files of one
folder.py     the folder with the last few
"""
