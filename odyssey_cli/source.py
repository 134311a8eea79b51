"""What `odyssey plan` plans with: a profile file, the log of a job, or a model and cluster of `configs/`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launcher import events
from odyssey.errors import UsageError
from odyssey.plan import Plan
from odyssey_cli.run import newest_job
from perfmodel.profile import Profile, read

LOGS = Path("odyssey-logs")
_HOW = "measure one with `odyssey profile train.py`, or name a job's log directory or a model of configs/"


class Source(msgspec.Struct, frozen=True):
    """`plan`: the newest one of the job, None for a mere profile. `mtbf_s`: as the job was told, if it was."""

    name: str
    profile: Profile
    n_nodes: int
    ranks_per_node: int
    plan: Plan | None = None
    mtbf_s: float | None = None


def find(text: str | None) -> Source:
    """The source that `text` names; without one `./profile.json`, or the newest job of `./odyssey-logs`."""
    if text is not None:
        return _named(text)
    if Path("profile.json").is_file():
        return of_profile(Path("profile.json"))
    job = newest_job(LOGS)
    if job is not None:
        return of_job(job)
    raise UsageError("nothing to plan with: no profile.json and no job in odyssey-logs here", _HOW)


def _named(text: str) -> Source:
    path = Path(text)
    if path.is_dir():
        if (path / "events.jsonl").is_file():
            return of_job(path)
        job = newest_job(path)
        if job is None:
            raise UsageError(f"{text}: no events.jsonl in it or below it", _HOW)
        return of_job(job)
    if path.suffix == ".jsonl" and path.is_file():
        return of_job(path.parent)
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError(f"{text}: no such file", _HOW)
        return of_profile(path)
    return of_config(text)


def of_profile(path: Path) -> Source:
    """A measured profile; as many ranks as it was measured for."""
    profile = read(path)
    cluster = profile.cluster
    return Source(str(path), profile, cluster.nodes_per_host, cluster.ranks_per_node)


def of_job(folder: Path) -> Source:
    """The newest profile and plan of a job's log."""
    profile: Profile | None = None
    plan: Plan | None = None
    started: events.JobStarted | None = None
    for number, line in enumerate((folder / "events.jsonl").read_bytes().splitlines(), 1):
        try:
            body = events.decode(line).body
        except msgspec.MsgspecError as error:
            raise UsageError(f"{folder / 'events.jsonl'}: line {number}: {error}", "is it of another version?") from None
        match body:
            case events.JobStarted():
                started = body
            case events.Profiled():
                profile = body.profile
            case events.PlanChosen():
                plan = body.plan
            case _:
                pass
    if started is None or profile is None:
        raise UsageError(f"{folder}: the job ended before its model was measured", _HOW)
    return Source(str(folder), profile, started.n_nodes, started.n_ranks_per_node, plan, started.mtbf_s)


def of_config(name: str) -> Source:
    """A model or cluster of `configs/`, by name or file."""
    raise UsageError(f"{name}: no such profile, job or model", _HOW)
