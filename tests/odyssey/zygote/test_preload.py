"""The next start has ready what the script imported, but for what a fork could not take back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import wave
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.host.loop import Loop
from launcher.joblog.events import Note
from launcher.options import RunOptions
from launcher.processes.rank_process import Zygote
from launcher.processes.warm_zygote import WarmZygote
from odyssey.zygote import preload
from tests.agent_runs import Ran, nothing_left  # noqa: F401

pytestmark = pytest.mark.timeout(120)

MODULES = {
    "good": "import json",
    "reader": "import os; rank = int(os.environ.get('RANK', -1))",
    "user": "import reader, good",
    "threaded": "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "brief": "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    "failing": "raise ValueError",
    "exiting": "raise SystemExit",
    "later": "import os\ndef rank(): return os.environ['RANK']",
    "sets": "import os; os.environ['SET'] = 'new'; os.environ.pop('REMOVED'); os.environ['CHANGED'] += ' and more'",
    "defaults": "import os; [os.environ.setdefault(name, 'mine') for name in ('DEFAULT', 'OWN')]",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def import_all(*names: str) -> dict[str, str]:
    """In a process of its own, as it changes that."""
    code = (
        "import sys; from odyssey.zygote import preload; "
        "print(preload.import_all(sys.argv[1:], {'RANK'}), 'reader' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    left_out: dict[str, str] = eval(done.stdout.rpartition("}")[0] + "}")
    return left_out


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (("good", "later", "brief"), {}),
        (("reader",), {"reader": "reads RANK"}),
        (("user",), {"reader": "reads RANK", "user": "reads RANK"}),
        (("threaded", "good"), {"threaded": "starts a thread"}),
        (("failing", "good"), {"failing": "ValueError when imported alone"}),
        (("exiting",), {"exiting": "SystemExit when imported alone"}),
        (("no_such",), {"no_such": "ModuleNotFoundError when imported alone"}),
    ],
)
def test_what_a_fork_could_not_take_back_is_left_out(names: tuple[str, ...], left_out: dict[str, str]) -> None:
    assert import_all(*names) == left_out


@pytest.mark.usefixtures("modules")
def test_variables_that_modules_set_at_import_are_set_in_a_fork() -> None:
    code = """
import os
from odyssey.zygote import preload
os.environ |= {"REMOVED": "1", "CHANGED": "what was"}
rank = {**os.environb, b"OWN": b"the rank's"}
preload.import_all(["sets", "defaults"], ["RANK"])
os.environb.clear()
os.environb.update(rank)
preload.repair()
print({name: os.environ.get(name) for name in ("SET", "REMOVED", "CHANGED", "DEFAULT", "OWN")})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == {
        "SET": "new",
        "REMOVED": None,
        "CHANGED": "what was and more",
        "DEFAULT": "mine",
        "OWN": "the rank's",
    }


def test_what_is_in_a_package_is_left_out_with_it() -> None:
    assert preload.is_left_out("a.b.c", {"a.b"})
    assert not preload.is_left_out("a.bc", {"a.b"})


@pytest.mark.usefixtures("modules")
def test_another_zygote_is_made_without_what_was_left_out() -> None:
    loop = Loop(lambda: 0.0)
    said: list[str] = []
    ready: list[Zygote] = []
    made: list[Zygote] = []

    def make() -> Zygote:
        made.append(Zygote(["json"], dict(os.environ), 1, quiet=True))
        return made[-1]

    learning = WarmZygote(loop, ("RANK",), make=make, ready=ready.append, explain=said.append)
    learning.begin(("good", "reader", "user", "threaded"))
    while not ready:
        loop.turn()
    learning.close()
    loop.close()
    ready[0].close()
    for zygote in made:
        os.waitpid(zygote.pid, 0)
    assert len(made) == 3  # `user` was seen to read RANK only once `reader` was not there before it
    (text,) = said
    assert text.startswith("the next start has 1 modules ready, left out: ")
    assert "reader (reads RANK)" in text and "user (reads RANK)" in text and "threaded (starts a thread)" in text


def test_the_first_zygote_reads_no_variable_of_a_rank() -> None:
    """Else every fork would have the values of none."""
    from launcher.processes.environment import of_ranks
    from launcher.processes.rank_process import imports_for

    names = [*imports_for(RunOptions(__file__)), "torch._dynamo", "odyssey.job"]  # this file names both words
    code = f"from odyssey.zygote import preload; print(preload.import_all({names}, {sorted(of_ranks(RunOptions('x')))}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"


class Untouchable:
    def __getattribute__(self, name: str) -> object:
        raise AssertionError("it is looked at")


def test_only_what_is_new_is_looked_at_when_a_rank_tells_what_it_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there belongs to the zygote: a look copies its pages."""
    modules = {"known": Untouchable(), "json": json, "mine": sys.modules[__name__], "wave": wave}
    monkeypatch.setattr(preload, "sys", SimpleNamespace(modules=modules))
    assert [*preload.installed(1)] == ["json", "wave"]
    del modules["known"]
    assert [*preload.installed(1)] == ["wave"]
    assert [*preload.installed(4)] == []


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
print("new" if "wave" not in sys.modules else "ready", flush=True)
import wave, mine
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print(len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks), "mine" in sys.modules, flush=True)
Path(sys.argv[1]).touch()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000)
"""


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_is_started_again_finds_its_imports_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.processes.spawner.WORTH_LEARNING", 1)
    (tmp_path / "mine.py").write_text("import sys; print('mine is read anew', flush=True)")
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = tmp_path / "printed"
    notes: list[str] = []

    def kill_when_learned(event: object, ran: Ran) -> None:
        body = getattr(event, "body", None)
        if isinstance(body, Note):
            notes.append(body.text)
            if body.text.startswith("the next start has"):
                while not printed.exists():
                    pass
                os.kill(_ranks(ran)[0], signal.SIGKILL)

    options = RunOptions(
        str(tmp_path / "script.py"),
        (str(printed),),
        max_restarts=1,
        verbose=True,
        capture_output=True,
        log_dir=tmp_path / "logs",
    )
    ran = Ran(options, kill_when_learned)
    assert ran.code == 0, (notes, ran.text(), ran.text("stderr"))
    assert ran.text().split("\n") == ["new", "mine is read anew", "0 True", "ready", "mine is read anew", "0 True", ""]


def _ranks(ran: Ran) -> list[int]:
    from launcher.joblog.events import RankStarted

    return [started.pid for started in ran.all(RankStarted)]
