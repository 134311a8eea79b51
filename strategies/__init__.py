"""What to do after a change: one file a strategy (Situation -> Proposals), and the search that prices and ranks them all.

May import `perfmodel`, `odyssey.plan`, `odyssey.schedule` and `odyssey.errors`, and no torch.

    situation.py  what a strategy is given and answers      search.py   all strategies, priced, best first
    layouts.py    splits, shares and layouts                compose.py  from ranges to a validated Plan
    ordering.py   explicit orders by list scheduling        dryrun.py   what would happen if
"""
