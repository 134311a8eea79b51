"""In words, whether the gradients of a plan are exact."""

from __future__ import annotations

from launcher.joblog.wording import ranks_text
from odyssey.plan.plan import Plan
from odyssey.plan.worker import all_ranks_of
from odyssey_cli.display import quantities


def fidelity(before: Plan | None, plan: Plan) -> str:
    """Where they are not, or are again after the plan before; else nothing."""
    if plan.approximation is not None:
        ranks = all_ranks_of(plan.approximation.workers)
        return f"gradients are approximate on {ranks_text(ranks)} from step {plan.step} on"
    if before is not None and before.approximation is not None:
        return f"gradients are exact again from step {plan.step} on"
    return ""


def share(n_approximate: int, n_steps: int) -> str:
    """Say which part of a job's steps it was."""
    return f"gradients were approximate in {n_approximate} of {quantities.plural(n_steps, 'step')}"
