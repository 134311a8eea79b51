"""The step of an answer's plans as a picture: as it is now, and after the loss."""

from __future__ import annotations

from launcher.joblog.wording import ranks_text
from odyssey_cli.planning.ask import Answer
from odyssey_cli.timeline.picture import Picture, headline, places_left, predicted
from perfmodel.profile import Profile


def timeline(answer: Answer, profile: Profile, *, with_loss: bool) -> Picture:
    """The layout now; `with_loss`: below it the plan chosen for the outcome that the answer shows, if there is one."""
    chosen, lost = answer.chosen, answer.shown.ranks
    if not with_loss or chosen is None or chosen.plan is None:
        return Picture(f"{answer.source}: one training step", (predicted(headline("", answer.now), answer.now, profile),))
    before = predicted(headline("before", answer.now), answer.now, profile)
    after = predicted(
        headline("after", chosen.plan, chosen.strategy),
        chosen.plan,
        profile,
        lost=places_left(lost, answer.now, chosen.plan),
    )
    return Picture(f"{answer.source}: one training step before and after the loss of {ranks_text(lost)}", (before, after))
