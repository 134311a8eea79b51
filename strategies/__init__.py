"""What to do after a change: one file a strategy (Situation -> Proposals), and the search that prices and ranks them all.

May import `perfmodel`, `odyssey.plan`, `odyssey.schedule` and `odyssey.errors`, and no torch. Every file is a strategy; no
strategy imports another. Beside them, from the top:

search      all strategies, asked and priced, the best first; what they are not asked for: how a job starts
building    what strategies are made of
situation   what a strategy is given and answers
"""
