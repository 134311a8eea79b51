"""What strategies are made of, below all of them.

layouts.py  splits of layers over workers, shares of the batch, layouts
compose.py  from ranges of layers to a validated Plan
ordering.py explicit orders by list scheduling
"""
