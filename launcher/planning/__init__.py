"""What to do after a change: the answer of the search, looked up where it was computed ahead.

planner.py      has ranks measure and plans searched, and times both
situations.py   what the coordinator asks, as a question to the search
precompute.py   a process of low priority that answers before it is asked
live_profile.py the job's profile, kept true by real steps
"""
