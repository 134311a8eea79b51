"""`odyssey` whose jobs start with the plan in a file: `python -m benchmarks.with_plan PLAN run …` in place of `odyssey run …`.

So that a job can be compared with another program that does the same, whatever a search would choose on that day.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec.structs import replace

from odyssey.plan.plan import decode
from odyssey_cli.__main__ import main
from strategies import initial
from strategies.situation import Candidate, Proposal, Situation


def start_with(file: Path) -> None:
    """The only plan that is proposed at a start."""
    plan = decode(file.read_bytes())

    def start(situation: Situation) -> list[Proposal | Candidate]:
        own = replace(plan, generation=situation.generation, step=situation.step)
        return [Proposal(initial.NAME, own, f"from {file}")]

    initial.start = start


if __name__ == "__main__":
    start_with(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
