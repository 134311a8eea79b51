"""The layers that a rank holds, and their state.

model.py   all layers, those that are here and those that are not
unit.py    the state of one of them, exactly
packing.py as bytes, digested
given.py   what a script hands over, checked
"""
