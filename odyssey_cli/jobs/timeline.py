"""`odyssey timeline`: what every rank of a job did during a step of each generation, and what was predicted."""

from __future__ import annotations

import sys

from launcher.joblog import reader
from launcher.joblog.events import Event
from launcher.joblog.exit_codes import ExitCode
from odyssey.codec import for_people
from odyssey.errors import UsageError
from odyssey_cli import files
from odyssey_cli.jobs import find as jobs
from odyssey_cli.timeline import save, terminal
from odyssey_cli.timeline.recorded import Generation, generations, picture, stands

N_GENERATIONS = 4
"""The newest of so many are shown where none is asked for."""
MOST_OF_COMMAND = 60
"""Characters of a job's command in the title."""


def timeline(
    job_text: str | None,
    *,
    generation: int | None,
    with_prediction: bool,
    svg: str | None,
    trace: str | None,
    change: str | None,
) -> int:
    """Show it on stdout; returns the exit code."""
    svg_file, trace_file = files.check_if_given(svg, "--svg"), files.check_if_given(trace, "--trace")
    change_file = files.check_if_given(change, "--change")
    job = jobs.find(job_text)
    known = generations(entry for entry in reader.entries(job.folder / reader.NAME) if isinstance(entry, Event))
    if not known:
        raise UsageError(f"{job.name} has run no plan", "only a script that hands its layers to odyssey.Job has steps to show")
    shown = known[-N_GENERATIONS:] if generation is None else [found for found in known if found.number == generation]
    if not shown:
        numbers = ", ".join(str(found.number) for found in known[-20:])
        raise UsageError(f"--generation: {job.name} has run no generation {generation}", f"it has run {numbers}")
    command = for_people(job.command, MOST_OF_COMMAND)
    if change_file is not None:
        save.save_change(f"{command}: the layout of each generation", stands(_with_one_before(known, shown)), change_file)
    title = f"{command}: one training step of each generation"
    started = job.started
    how = "rehearsed" if started.rehearsed else "measured"
    drawn = picture(title, shown, how, with_prediction=with_prediction, speed=started.speed)
    if not drawn.panels:
        raise UsageError(f"{job.name} has no recorded step to show", "each generation records its third one")
    terminal.show(drawn)
    if generation is None and len(shown) < len(known):
        left_out = ", ".join(str(found.number) for found in known[:-N_GENERATIONS][-20:])
        print(f"odyssey: left out: generations {left_out}; --generation N shows one", file=sys.stderr)
    save.save(drawn, svg_file, trace_file)
    return ExitCode.OK


def _with_one_before(known: list[Generation], shown: list[Generation]) -> list[Generation]:
    """What has changed is seen against the generation before."""
    first = known.index(shown[0])
    return known[max(0, first - 1) : first] + shown
