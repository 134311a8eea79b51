"""All strategies together: asked, priced, ranked.

table.py     every strategy's candidates for a change, best first
ranking.py   which is the best, and why each other one is not
next_loss.py   what a plan leaves for the next loss
near_equal.py      which are as good as the best, as far as prices can tell
lengths.py   the layout that a user asks for
cut_micro_batches.py    the best once more with micro-batches cut (no strategy: it works on what strategies have proposed)
zero_bubble.py     the best once more with the backward in halves (likewise)
protected.py the best once more with what strategies ask to keep of layers that would have one holder
unchanged.py how it goes on where no worker of its plan is lost: what all that is proposed then is measured against
last_resort.py  how it goes on where a bug has left no plan
dryrun.py    the same for losses that have not happened
loss_classes.py     which losses are alike
planned_losses.py  the losses to plan for before they happen
lifetime_value.py  what a plan comes to over a given time
starts.py    layouts to start with, and ranks that stand by
"""

from strategies.search.ranking import best
from strategies.search.table import answer, check_holders, initial_plan, rescore, search, warm_up

__all__ = ["answer", "best", "check_holders", "initial_plan", "rescore", "search", "warm_up"]
