"""What strategies are made of, below all of them: no strategy imports another.

layouts.py  splits of layers over workers, shares of the batch, layouts
compose.py  from ranges of layers to a proved Plan
moves.py    who sends which layer to whom, and in which order
draft.py    from a layout to a Plan: which worker gets which layers
routing.py  others do what a lost worker did
exchange.py their orders, worked out once for those that are alike
ordering.py explicit orders of pipelines that exchange micro-batches
"""
