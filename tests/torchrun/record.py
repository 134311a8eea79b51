"""What torchrun answered, a file for each torch (records/2.13.json): ours is held against it, and torchrun is not started.

A case is a test under both launchers, or a fixture that several share. Its answers are all that its scene saw and that is no
chance or free choice: exit codes, output, what each rank found around it, what ranks said, the logs. The same assertions
hold beside this under both. `make soak` runs torchrun and holds the record against it. Where the torch that is installed has
no record, torchrun is run always; to make one, or anew, run these tests with ODYSSEY_REWRITE=1 and `-m "soak or not soak"`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from odyssey_cli.command_line.torch_version import installed, spelled
from tests import ROOT

if TYPE_CHECKING:
    from tests.launchers import Launcher, Probe, Run, Scene

FILE = Path(__file__).parent / "records" / f"{spelled(installed())}.json"
only_without_record = [pytest.mark.soak] if FILE.exists() and not os.environ.get("ODYSSEY_REWRITE") else []
"""Marks of what runs torchrun."""
BY_CHANCE = {
    "torchrun/test_environment.py::test_agents_meet_through_c10d_and_share_out_the_ranks": "which agent comes first",
}
"""Cases without a record, as torchrun itself does not answer the same twice."""
_BEHAVIOUR = "torchrun/test_behaviour.py::"
FREE = {
    # torchrun runs a function of its own in a process of multiprocessing, in its own session
    f"{_BEHAVIOUR}test_run_path_runs_the_script_as_main": (
        "/ranks/0.0/(catches|command line|is in a session of its own|facts/(orig_argv|path0|write_through))"
    ),
    # both launchers' own words, beside what the test looks at
    f"{_BEHAVIOUR}test_help_names_every_option_of_torchrun": "/runs/0/stdout",
    f"{_BEHAVIOUR}test_lines_keep_their_order_when_both_streams_go_to_one_file": "/runs/0/stdout",
}
"""What of a case is no answer of torchrun's, and need not be ours."""
FACTS = (
    "argv", "cached", "cwd", "executable", "file", "has_spec", "is_main", "isatty", "name", "nice", "orig_argv", "package",
    "path0", "store_answers", "umask", "write_through", "SigIgn", "SigBlk",
)  # fmt: skip
"""What a probe finds that does not depend on the machine, the Python or the moment."""
OUR_OWN = ("ODYSSEY_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONFAULTHANDLER")
"""How the variables begin that ours alone gives."""
CRASHES = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""What PYTHONFAULTHANDLER has Python catch."""
CHOSEN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
"""Variables whose value is the launcher's choice, unless it is given one."""


def hold(case: str, scene: Scene, launcher: Launcher) -> None:
    """Against the record; torchrun's with ODYSSEY_REWRITE becomes the record."""
    if case in BY_CHANCE:
        return
    found = json.loads(json.dumps(answers(scene)))
    if not launcher.is_ours and os.environ.get("ODYSSEY_REWRITE"):
        _write(case, found)
    elif FILE.exists():
        recorded = json.loads(FILE.read_text()).get(case)
        assert recorded is not None, f"{FILE} has no {case}: make it with ODYSSEY_REWRITE=1"
        if launcher.is_ours:
            for run, of_torchrun in zip(found["runs"], recorded["runs"], strict=True):
                run["code"] = _as_torchruns(run["code"], of_torchrun["code"])
        different = [text for text in _differences(found, recorded) if not (launcher.is_ours and _is_free(case, text))]
        assert not different, f"{case}: not as recorded in {FILE.name}:\n" + "\n".join(different)


def _differences(found: Any, recorded: Any, where: str = "") -> Iterator[str]:
    if isinstance(found, dict) and isinstance(recorded, dict):
        for name in sorted({*found, *recorded}):
            yield from _differences(found.get(name), recorded.get(name), f"{where}/{name}")
    elif isinstance(found, list) and isinstance(recorded, list) and where == "/runs":
        for i, (run, of_torchrun) in enumerate(zip(found, recorded, strict=True)):
            yield from _differences(run, of_torchrun, f"{where}/{i}")
    elif found != recorded:
        yield f"{where}: {found!r}, recorded {recorded!r}"


def _is_free(case: str, difference: str) -> bool:
    return case in FREE and re.match(FREE[case], difference) is not None


def _as_torchruns(code: int, recorded: int) -> int:
    """Where torchrun ends with 1 whatever it was: ours tells the signal, and a command line that cannot be meant."""
    return recorded if recorded == 1 and (code == 2 or code > 128) else code


def _write(case: str, found: Any) -> None:
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests beside this one write as well
        file.seek(0)
        record = json.loads(file.read() or "{}") | {case: found}
        file.truncate(0)
        json.dump(record, file, indent=1, sort_keys=True)
        file.write("\n")


# -- what a scene saw --------------------------------------------------------------------------------------------------


def answers(scene: Scene) -> dict[str, Any]:
    def said(text: str) -> str:
        return _said(text, scene)

    return {
        "runs": [{"code": run.process.poll(), "stdout": sorted(map(said, run.stdout.splitlines()))} for run in scene.runs],
        "said": sorted(map(said, scene.heard)),
        "ranks": {path.stem: _of_rank(scene.probe_at(path), scene) for path in sorted(scene.probes_dir.glob("*.json"))},
        "logs": {name: sorted(map(said, text.splitlines())) for name, text in _logs(scene.cwd)},
    }


def _of_rank(probe: Probe, scene: Scene) -> dict[str, Any]:
    facts = {**probe.facts, "SigIgn": [number for number in probe.facts["SigIgn"] if number < 32]}  # make leaves more
    return {
        "facts": _each(lambda text: _plain(text, scene), {name: facts[name] for name in FACTS}),
        "command line": _plain(" ".join(facts["cmdline"]).rstrip(), scene),
        "streams": [_plain(name, scene) for name in facts["streams"][:2]],  # of stderr ours keep the last lines
        "is in a session of its own": facts["pid"] == facts["sid"] == facts["pgid"],
        # ours use a real-time one, and have Python tell of crashes
        "catches": [number for number in facts["SigCgt"] if number < 32 and number not in CRASHES],
        "is given": {name: _value(name, value, scene) for name, value in probe.env.items() if _is_given(name, value, scene)},
        "is taken": sorted({name for run in scene.runs for name in run.env} - set(probe.env)),
    }


def _is_given(name: str, value: str, scene: Scene) -> bool:
    return not name.startswith(OUR_OWN) and all(run.env.get(name) != value for run in scene.runs)


def _value(name: str, value: str, scene: Scene) -> str:
    if name in CHOSEN:
        return "as told" if any(_is_told(value, run) for run in scene.runs) else "any"
    return value[value.index("attempt_") :] if name == "TORCHELASTIC_ERROR_FILE" and value else _plain(value, scene)


def _is_told(value: str, run: Run) -> bool:
    return any(value in text for text in (*run.command, *(run.env[name] for name in run.env if name.startswith("PET_"))))


def _logs(folder: Path) -> list[tuple[str, str]]:
    """Those of ranks where a folder was asked for. The launchers have different defaults, and names for a job's folder."""
    found = []
    for path in sorted(folder.glob("**/attempt_*/**/*")):
        *above, name = path.relative_to(folder).parts
        if path.is_file() and "odyssey-logs" not in above:
            i = next(i for i, part in enumerate(above) if part.startswith("attempt_"))
            told = "/".join([*above[: i - 1], "JOB", *above[i:], name])
            found.append((told, path.read_text() if name.endswith(".log") else ""))
    return found


def _each(change: Any, value: Any) -> Any:
    """`change` of every text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(change, part) for name, part in value.items()}
    return [_each(change, part) for part in value] if isinstance(value, list) else value


def _plain(text: str, scene: Scene) -> str:
    """Without what differs from scene to scene, host to host and Python to Python: folders, descriptors, names."""
    places = {str(scene.folder): "SCENE", str(scene.tmp): "TMP", sys.executable: "PYTHON", str(ROOT): "REPO"}
    for place, name in places.items():
        text = text.replace(place, name)
    text = re.sub(r"(_fd=|_handle=|cpython-)\d+", r"\1#", text)
    text = re.sub(r"[^/\s]+/attempt_", "JOB/attempt_", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)


def _said(text: str, scene: Scene) -> str:
    """What somebody wrote, without the numbers of processes and ports, and the names of shared memory."""
    return re.sub(r"\bpsm_\w+", "psm_#", re.sub(r"\b\d{3,}\b", "#", _plain(text, scene)))
