"""An answer's plans as pictures, as it is now, after the loss and with those that have come: the step, and the layout."""

from __future__ import annotations

from launcher.joblog.wording import ranks_text
from odyssey.protocol.calls import ranks_alike
from odyssey_cli.planning.ask import Answer
from odyssey_cli.timeline.change import Stand
from odyssey_cli.timeline.picture import Picture, headline, places_left, predicted
from perfmodel.profile.profile import Profile


def timeline(answer: Answer, profile: Profile, *, with_change: bool) -> Picture:
    """The layout now; `with_change`: below it the plans for the outcome that the answer shows, and for those who come."""
    before, *after = stands(answer)
    if not with_change or not after:
        return Picture(f"{answer.source}: one training step", (predicted(headline("", before.plan), before.plan, profile),))
    panels = [predicted(headline("before", before.plan), before.plan, profile)]
    for stand in after:
        title = headline("after" if stand.lost else "grown", stand.plan, stand.plan.strategy)
        panels.append(predicted(title, stand.plan, profile, lost=places_left(stand.lost, before.plan, stand.plan)))
    changes = [f"after the loss of {ranks_text(answer.shown.ranks)}"] if answer.shown is not None else []
    changes += [f"with {ranks_alike(answer.joined.ranks)}"] if answer.joined is not None else []
    return Picture(f"{answer.source}: one training step before and {', then '.join(changes)}", tuple(panels))


def stands(answer: Answer) -> tuple[Stand, ...]:
    """The layout now, the one after the outcome that the answer shows, if training goes on, and the one with those who come."""
    found = [Stand(headline("now", answer.now), answer.now)]
    shown, chosen = answer.shown, answer.chosen
    if shown is not None and chosen is not None and chosen.plan is not None:
        title = headline(f"without {ranks_text(shown.ranks)}", chosen.plan, chosen.strategy)
        found.append(Stand(title, chosen.plan, shown.ranks))
    if answer.joined is not None and (grown := answer.joined.chosen) is not None and grown.plan is not None:
        found.append(Stand(headline(f"with {ranks_alike(answer.joined.ranks)}", grown.plan, grown.strategy), grown.plan))
    return tuple(found)
