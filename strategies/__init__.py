"""What to do after a change: one file a strategy (Situation -> Proposals), and the search that prices and ranks them all.

May import `perfmodel`, `odyssey.plan`, `odyssey.schedule` and `odyssey.errors`, and no torch.

    situation.py  what a strategy is given and answers      search.py   all strategies, priced, best first
    dryrun.py     what would happen if                      building/   what strategies are made of
"""
