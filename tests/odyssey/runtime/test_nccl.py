"""What a rank must not take from NCCL: the end of a wait for that of the work, and its own end for that of a peer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from launcher.processes.environment import for_all, nccl_problem
from odyssey.model.model import Model
from odyssey.plan.needs import Needs
from odyssey.plan.plan import Plan
from odyssey.protocol.model_spec import ModelSpec
from odyssey.runtime import nccl
from odyssey.runtime.backend import Backend
from odyssey.runtime.data import MapStyle
from odyssey.runtime.engine import Engine
from odyssey.runtime.exchange import Exchange
from odyssey.runtime.groups import Cut, Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.job_spec import JobSpec
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import Sampler
from odyssey.runtime.session import Session
from odyssey.runtime.tally import Tally
from odyssey.runtime.transaction import N_VALUES, Transaction
from tests import models
from tests.odyssey.runtime.test_buckets import CPU, replicas

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Queued:
    """The work of an operation on a device: a wait for it returns at once, and what comes of it shows when it is done."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.asked = threading.Event()
        self.error = ""

    def wait(self) -> bool:
        if self.done.is_set() and self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        self.asked.set()
        return self.done.is_set()

    def end(self, error: str = "") -> None:
        self.error = error
        self.done.set()


def on_device(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> tuple[Groups, list[Queued]]:
    """Groups of a plan whose reductions are queued, and their works."""
    groups = Groups(to_nobody, 1, Needs(plan.workers), 0, CPU)
    works: list[Queued] = []

    def all_reduce(*_: object, **__: object) -> Queued:
        works.append(Queued())
        return works[-1]

    monkeypatch.setattr(groups, "all_reduce", all_reduce)
    monkeypatch.setattr(groups.wire, "is_on_device", True)
    return groups, works


def engine(plan: Plan, groups: Groups) -> Engine:
    """Worker 0, whose partner is not there."""
    model = Model(lambda: models.build_layers("gpt"), lambda params: torch.optim.SGD(params, 0.1), None, CPU, 0)
    model.hold_built(plan.holds[0])
    spec = ModelSpec((), (), (), plan.global_batch, plan.micro_batch, 96, 0, "cpu")
    job_spec = JobSpec(spec, models.loss_for("gpt"), None, None, None, 0, None)
    data = Prefetcher(MapStyle(models.data_for("gpt"), Sampler(96, 0), plan))
    return Engine(plan, 0, model, job_spec, Backend(), data, groups, (), Tally(plan.n_layers, plan.ties))


class Beside:
    """Runs `act` on a thread, and keeps what it gives or raises."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self.value = act()
        except Exception as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(60)
        assert self.is_over


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step whose reductions have been queued and waited for, and are not done."""
    plan = replicas("gpt")
    groups, works = on_device(monkeypatch, plan)
    made = engine(plan, groups)
    running = Beside(lambda: made.run_step(0))
    while not works:
        assert not running.is_over, running.error
    assert works[0].asked.wait(60)
    yield groups, works, running
    for work in works:
        work.end()
    groups.release()


def test_a_step_ends_when_the_device_has_done_its_reductions(step: Any) -> None:
    _, works, running = step
    assert not running.is_over
    for work in works:
        work.end()
    running.end()
    assert running.error is None and len(running.value) == N_VALUES


def test_a_reduction_that_fails_on_the_device_cuts_the_step(step: Any) -> None:
    _, works, running = step
    works[-1].end("NCCL error: remote process exited or there was a network error")
    for work in works[:-1]:
        work.end()
    running.end()
    assert isinstance(running.error, Cut) and "remote process exited" in str(running.error)


def test_a_reduction_that_a_cut_has_ended_is_none(step: Any) -> None:
    """An aborted operation looks done, and nobody says that it failed."""
    groups, works, running = step
    groups.cut("paused")
    for work in works:
        work.end()
    running.end()
    assert isinstance(running.error, Cut)


def test_what_a_stage_receives_has_come_before_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, _ = on_device(monkeypatch, replicas("gpt"))
    exchange = Exchange(replicas("gpt"), groups, None, (), None)  # type: ignore[arg-type]
    done, failed = Queued(), Queued()
    done.end()
    failed.end("NCCL error")
    exchange._received.extend([done, failed])
    with pytest.raises(Cut, match="NCCL error"):
        exchange.finish()
    groups.release()


def test_who_was_cut_behind_the_body_of_a_unit_contributes_nothing() -> None:
    """A body that waits for a device in a way of its own may have ended well because it was cut."""

    class Cutting:
        groups = Groups(to_nobody, 1, Needs((0,)), 0, CPU)
        now = ("", 0.0)

    def body(made: Any) -> tuple[float]:
        made.groups.cut("paused")
        return (1.0,)

    session = Session.__new__(Session)
    session.runner, session._compares = Cutting(), False  # type: ignore[assignment]
    with pytest.raises(Cut, match="paused"):
        session._transact(Transaction("step", body, tuple, lambda *_: None))
    Cutting.groups.release()


def test_a_generations_own_thread_begins_operations_and_a_cut_ends_the_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails leaves its thread unfit for others, and one that connects may wait for ever."""
    monkeypatch.setattr(nccl, "on_this_stream", lambda operation: operation)
    groups, held = Groups(to_nobody, 1, Needs((0,)), 0, CPU), threading.Event()
    assert groups._start(threading.current_thread, is_on_device=True).name == "odyssey-wait-1"
    waiting = Beside(lambda: groups._start(held.wait, is_on_device=True))
    groups.cut("paused")
    waiting.end()
    assert isinstance(waiting.error, Cut)
    held.set()
    groups.release()


# -- variables -----------------------------------------------------------------------------------------------------------


def outlived(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    with monkeypatch.context() as patch:
        for name in nccl.OUTLIVING:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        nccl.outlive_peers()
        return {name: os.environ.get(name) for name in nccl.OUTLIVING}


def test_a_jobs_ranks_do_not_end_with_their_peers_and_others_are_as_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    given = for_all({}, 2)
    assert given[HANDLING] == "1"
    assert outlived(given, monkeypatch) == nccl.OUTLIVING
    within = for_all(given, 2)  # of a launcher that is a rank itself
    assert within[HANDLING] == "1" and outlived(within, monkeypatch) == nccl.OUTLIVING
    assert outlived({}, monkeypatch) == nccl.OUTLIVING


@pytest.mark.parametrize(("value", "ends"), [("0", False), ("1", True), ("2", True), ("3", True)])
def test_what_a_user_sets_stays_and_is_told_where_it_ends_survivors(
    value: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = for_all({HANDLING: value}, 2)
    assert given[HANDLING] == value and outlived(given, monkeypatch)[HANDLING] == value
    assert (f"{HANDLING}={value}" in nccl_problem({HANDLING: value})) == ends
    assert nccl_problem({}) == nccl_problem(for_all({}, 2)) == ""
