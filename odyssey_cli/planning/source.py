"""What `odyssey plan` plans with: a profile file, the log of a job, or a model and cluster of `configs/`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launcher.coordinator.machine import step
from launcher.coordinator.state import JobState, PlainState, State, World
from launcher.joblog import reader
from launcher.joblog.events import PlanChosen
from launcher.planning.situations import expected_change
from odyssey.errors import ProfileError, UsageError
from odyssey.plan.plan import Plan
from odyssey_cli.command_line import values
from odyssey_cli.jobs import find as jobs
from perfmodel.goodput.reliability import PRIOR_PER_NODE_DAY, ExpectedChange, seconds_to_change
from perfmodel.profile import catalog
from perfmodel.profile.profile import Profile, read
from strategies.situation import Aim

LOGS = Path("odyssey-logs")
_HOW = "measure one with `odyssey profile train.py`, or name a job's log directory or a model of configs/"


class Source(msgspec.Struct, frozen=True):
    """`plan`: the newest one of the job, None for a mere profile.

    `layout`: the one to start with where none is asked for. `world`: at the end of the job's log, None for a mere profile.
    """

    name: str
    profile: Profile
    n_nodes: int
    ranks_per_node: int
    plan: Plan | None = None
    layout: str = "auto"
    world: World | None = None

    @property
    def title(self) -> str:
        """The name, and whether somebody has measured it."""
        return f"{self.name}, modelled" if self.profile.is_modelled else self.name

    def resized(self, n_nodes: int | None, ranks_per_node: int | None) -> Source:
        """The same model on more or fewer ranks; then a job's own plan means nothing any more. Raises UsageError."""
        if n_nodes is None and ranks_per_node is None:
            return self
        nodes = n_nodes if n_nodes is not None else self.n_nodes
        per_node = ranks_per_node if ranks_per_node is not None else self.ranks_per_node
        values.check_n_ranks(nodes * per_node, f"--nodes {nodes} --nproc-per-node {per_node}")
        cluster = msgspec.structs.replace(self.profile.cluster, ranks_per_node=per_node)
        return msgspec.structs.replace(
            self,
            n_nodes=nodes,
            ranks_per_node=per_node,
            profile=msgspec.structs.replace(self.profile, cluster=cluster),
            plan=None,
            layout="auto",
            world=None,
        )

    @property
    def aim(self) -> Aim:
        """As the job was told."""
        return self.world.started.aim if self.world is not None and self.world.started is not None else Aim()

    def expected_change(self, mtbf_s: float | None, failure_rate: float | None) -> ExpectedChange:
        """When the next loss is expected: as asked for, or as the job was told and its log says."""
        if self.world is None or self.world.started is None:
            return seconds_to_change(0, 0.0, self.n_nodes, mtbf_s=mtbf_s, per_node_day=failure_rate)
        told = self.world.started
        if not self.world.alive:  # the job has ended: what is asked of is its layout, were it there
            node_s, _ = self.world.exposure(self.world.now)
            asked = failure_rate if failure_rate is not None else told.failure_rate
            rate = (PRIOR_PER_NODE_DAY if asked is None else asked) * told.speed
            given_s = mtbf_s if mtbf_s is not None or failure_rate is not None else told.mtbf_s
            n_nodes = len({*self.plan.workers, *self.plan.idle}) / self.ranks_per_node if self.plan else self.n_nodes
            return seconds_to_change(self.world.losses.n_events, node_s, n_nodes, mtbf_s=given_s, per_node_day=rate)
        return expected_change(
            self.world,
            self.world.now,
            mtbf_s if mtbf_s is not None or failure_rate is not None else told.mtbf_s,
            failure_rate if failure_rate is not None else told.failure_rate,
        )


def find(text: str | None) -> Source:
    """The source that `text` names; without one `./profile.json`, or the newest Job of `./odyssey-logs` that was measured."""
    if text is not None:
        return _named(text)
    if Path("profile.json").is_file():
        return of_profile(Path("profile.json"))
    folders = jobs.newest_first(LOGS)
    if (found := next(filter(None, map(_measured, folders)), None)) is not None:
        return found
    if folders:
        raise UsageError("nothing to plan with: no profile.json here, and no job in odyssey-logs has measured its model", _HOW)
    raise UsageError("nothing to plan with: no profile.json and no job in odyssey-logs here", _HOW)


def _named(text: str) -> Source:
    if text == "last":
        return of_job(jobs.find(text).folder)
    path = Path(text)
    if path.is_dir():
        if (path / reader.NAME).is_file():
            return of_job(path)
        job = jobs.newest_job(path)
        if job is None:
            raise UsageError(f"{text}: no {reader.NAME} in it or below it", _HOW)
        return of_job(job)
    if path.suffix == ".jsonl" and path.is_file():
        return of_job(path.parent)
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError(f"{text}: no such file", _HOW)
        return of_profile(path)
    if text not in catalog.names()["jobs"] and (called := jobs.called(text)) is not None:
        return of_job(called.folder)
    return of_config(text)


def of_profile(path: Path) -> Source:
    """A measured profile; as many ranks as it was measured for. Raises UsageError."""
    try:
        profile = read(path)
    except ProfileError as error:
        raise UsageError(error.what, error.help) from None
    cluster = profile.cluster
    return Source(str(path), profile, cluster.nodes_per_host, cluster.ranks_per_node)


def of_job(folder: Path) -> Source:
    """What a job's coordinator knew and had chosen at the end of its log. Raises UsageError."""
    if (found := _measured(folder)) is None:
        raise UsageError(f"{folder}: the job ended before its model was measured", _HOW)
    return found


def _measured(folder: Path) -> Source | None:
    """None for a script without a Job, and a Job that was not measured. Raises UsageError for a log that cannot be read."""
    state: State = PlainState()
    plan, last = None, 0.0
    for event in reader.events(folder / reader.NAME):
        state, _ = step(state, event)
        plan = event.body.plan if isinstance(event.body, PlanChosen) else plan
        last = event.time
    state.world.pass_time(last)
    started = state.world.started
    if not isinstance(state, JobState) or started is None or state.profile is None:
        return None
    return Source(
        str(folder),
        state.profile,
        started.n_nodes,
        started.n_ranks_per_node,
        plan,
        started.layout,
        state.world,
    )


def of_config(name: str) -> Source:
    """A job of `configs/` by name or file, or `model@cluster`."""
    try:
        job = catalog.load_job(name)
    except ProfileError as error:
        raise UsageError(error.what, error.help) from None
    per_node = min(job.profile.cluster.ranks_per_node, job.n_ranks)
    return Source(job.name, job.profile, -(-job.n_ranks // per_node), per_node, layout=job.layout)
