"""What a job may be started with: one layout or another, and ranks that stand by.

A rank that stands by idles until one is lost. If that is another one it takes the lost place (repartition) or a new one, as any
survivor may; if it is itself nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from odyssey.errors import UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.layout import layout_text
from strategies.building.compose import n_micro_batches_of
from strategies.search.ranking import best
from strategies.search.table import initial_plan
from strategies.situation import Candidate, Situation


def compared(situation: Situation, layout: str = "auto") -> tuple[list[Candidate], list[tuple[str, str]]]:
    """The best plan of each layout that is worth a look; and the layouts that have none, each with the reason.

    Those that the search prices for `auto`, equal pipelines of all ranks, and `layout`. Raises UsageError as `initial_plan`.
    """
    found: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    asked = ["auto"] if layout == "auto" else ["auto", layout]
    for text in (*asked, *_equal(situation)):
        if text in found:
            continue
        try:
            candidates = initial_plan(situation, text)
        except UsageError as error:
            if text in asked:
                raise
            refused[text] = error.what
            continue
        plans = [candidate for candidate in candidates if candidate.plan is not None]
        if not plans:
            refused[text] = candidates[0].reason
        for candidate in plans:
            assert candidate.plan is not None
            found.setdefault(layout_of(candidate.plan), candidate)
    return list(found.values()), list(refused.items())


def _equal(situation: Situation) -> Iterator[str]:
    """Layouts of pipelines of one length that take all ranks, as far as layers and micro-batches go."""
    n, n_micro_batches = len(situation.alive), n_micro_batches_of(situation)
    for length in range(1, min(n, len(situation.profile.layers)) + 1):
        if n % length == 0 and n // length <= n_micro_batches:
            yield layout_text([length] * (n // length))


def with_idle(situation: Situation, n_idle: int) -> Candidate | None:
    """The best layout for all ranks but the last so many, which idle, as of a job under `--spares`; None where there is none.
    Raises UsageError as `initial_plan`."""
    return best(initial_plan(replace(situation, n_spares=n_idle), "auto"))
