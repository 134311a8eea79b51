"""Checkpoints: whole or not there.

checkpoint.py state in a form free of the layout
parts.py      saved and loaded by all ranks together, each its part
folder.py     the folder with the last few
"""
