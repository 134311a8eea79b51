"""What strategies are made of, below all of them: no strategy imports another.

effort.py       how thoroughly all of this is done
closed_form.py  the time of a pipeline, and of many that share a batch
hosts.py        stages over hosts
buckets.py      reductions of layers
stage_memory.py what a stage takes of memory
halves.py       the time of a pipeline with its backward in halves
shapes.py       splits of layers over stages
layouts.py      how many pipelines of which lengths
uncut.py        a plan in force whose micro-batches are not to be cut any more
compose.py      from ranges of layers to a proved Plan
moves.py        who sends which layer to whom, and in which order
placement_score.py        what it is worth which worker gets which layers
placement.py    who gets them
layout_to_plan.py        from a layout to a Plan
regrouping.py   layouts of all that are there, made of the plan in force
routing.py      others do what a lost worker did
taking_over.py  a neighbour does
exchange.py     their orders, worked out once for those that are alike
ordering.py     explicit orders of pipelines that exchange micro-batches
"""
