"""What is known of a job before any plan is priced. In reading order:

- profile.py: the Profile, and its file
- merge.py: from what ranks have measured to a Profile
- catalog.py: a Profile by arithmetic, of models and clusters that nobody has run
- spread.py: how far off prices at a Profile may be
"""
