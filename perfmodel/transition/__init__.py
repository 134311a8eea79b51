"""What it takes from a change to the first op of the next plan. In reading order:

- transition.py: all of its parts
- moving.py: moves of state, one after the other where they need the same worker or interface
- keeping.py: what a cut step leaves that is not computed again
"""
