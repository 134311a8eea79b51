"""An answer's plans as pictures, as it is now and after the loss: the step, and the layout."""

from __future__ import annotations

from launcher.joblog.wording import ranks_text
from odyssey_cli.planning.ask import Answer
from odyssey_cli.timeline.change import Stand
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


def stands(answer: Answer) -> tuple[Stand, ...]:
    """The layout now, and the one after the outcome that the answer shows, if training goes on."""
    now, chosen, lost = answer.now, answer.chosen, answer.shown.ranks
    before = Stand(headline("now", now), now)
    if chosen is None or chosen.plan is None:
        return (before,)
    return before, Stand(headline(f"without {ranks_text(lost)}", chosen.plan, chosen.strategy), chosen.plan, lost)
