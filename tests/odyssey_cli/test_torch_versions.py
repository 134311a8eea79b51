"""What of the command line depends on the torch that is installed: options that torchrun has only from some version on."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from launcher.options import RunOptions
from odyssey.errors import UsageError
from odyssey_cli.command_line import torch_version
from odyssey_cli.command_line.help import help_text
from odyssey_cli.command_line.options import OPTIONS, Command
from odyssey_cli.command_line.parser import HelpAsked
from odyssey_cli.command_line.request import read
from tests import ROOT

SCRIPT = str(ROOT / "tests" / "models.py")
HERE = tuple(int(part) for part in torch.__version__.split(".")[:2])
OLD, NEW = (2, 13), (2, 15)
With = Callable[[tuple[int, int]], None]


@pytest.fixture
def with_torch(monkeypatch: pytest.MonkeyPatch) -> With:
    return lambda version: monkeypatch.setattr(torch_version, "installed", lambda: version)


def ours(argv: Sequence[str], environment: Mapping[str, str] | None = None, command: Command = Command.TORCHRUN) -> RunOptions:
    return read(argv, environment or {}, command).options


def refusal(argv: Sequence[str], command: Command = Command.TORCHRUN) -> UsageError:
    with pytest.raises(UsageError) as error:
        ours(argv, command=command)
    return error.value


def test_the_version_is_that_of_the_torch_which_would_be_imported() -> None:
    assert torch_version.installed() == HERE


@pytest.mark.parametrize(("line", "version"), [("__version__ = '3.20.1a0+git12ab'", "3.20"), ("debug = True", "0.0")])
def test_the_version_is_read_without_an_import(tmp_path: Path, line: str, version: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError")
    (tmp_path / "torch/version.py").write_text(f"from typing import Optional\n{line}\n")
    code = "from odyssey_cli.command_line.torch_version import installed, spelled; print(spelled(installed()))"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [version]


# -- options that are newer than the torch -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [Command.RUN, Command.TORCHRUN, Command.LAUNCH])
@pytest.mark.parametrize(
    ("argv", "unknown"),
    [
        (["--log-line-prefix-template", "x", SCRIPT], "--log-line-prefix-template"),
        (["--log_line_prefix_template=x", SCRIPT], "--log_line_prefix_template=x"),
        (["--log-l", "x", SCRIPT], "--log-l"),
        (["--print-completion", "bash"], "--print-completion"),
    ],
)
def test_an_older_torch_refuses_them_in_its_torchruns_words(
    with_torch: With, argv: list[str], unknown: str, command: Command
) -> None:
    with_torch(OLD)
    error = refusal(argv, command)
    assert error.what == f"unrecognized arguments: {unknown}"
    assert error.help is not None and "from torch 2.15 on, here is 2.13" in error.help
    if HERE < NEW:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
            torch.distributed.run.parse_args(argv)
        assert said.getvalue().rstrip().endswith(f"error: {error.what}")


def test_what_no_torchrun_has_and_other_commands_are_not_told_of_a_newer_torch(with_torch: With) -> None:
    with_torch(OLD)
    assert refusal(["--log-lines", SCRIPT]).what == "no such option: --log-lines"
    with pytest.raises(UsageError, match="no such option: --print-completion"):
        read(["--print-completion", "bash"], {}, Command.CHECK)


def test_abbreviations_mean_what_they_mean_to_the_torchrun_of_that_torch(with_torch: With) -> None:
    with_torch(OLD)
    assert ours(["--log-", "here", SCRIPT]).log_dir == Path("here")
    with_torch(NEW)
    assert refusal(["--log-", "here", SCRIPT]).what == "ambiguous option: --log-"
    assert ours(["--log-l", "here", SCRIPT]).line_prefix == "here"


def test_help_names_them_with_the_torch_that_has_them(with_torch: With) -> None:
    names = {option.name for option in OPTIONS if option.since == NEW}
    assert names == {"--log-line-prefix-template", "--print-completion"}
    with_torch(OLD)
    assert not any(name in help_text(Command.RUN) for name in names)
    with_torch(NEW)
    assert all(name in help_text(Command.RUN) for name in names)


# -- what they mean ----------------------------------------------------------------------------------------------------


def test_the_template_wins_over_the_older_variable(with_torch: With) -> None:
    older = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "older"}
    newer = {"PET_LOG_LINE_PREFIX_TEMPLATE": "newer"}
    with_torch(OLD)
    assert ours([SCRIPT], newer).line_prefix == ""
    assert ours([SCRIPT], older | newer).line_prefix == "older"
    with_torch(NEW)
    assert ours([SCRIPT], older).line_prefix == "older"
    assert ours([SCRIPT], older | newer).line_prefix == "newer"
    assert ours(["--log-line-prefix-template=given", SCRIPT], older | newer).line_prefix == "given"
    assert ours(["--log-line-prefix-template=", SCRIPT], older | newer).line_prefix == "older"


@pytest.mark.parametrize("value", ["0", "2.5", "-1", "inf", "soon"])
def test_the_backoff_has_no_effect_and_must_be_right_where_it_is_known(with_torch: With, value: str) -> None:
    c10d = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", SCRIPT]
    argv = [f"--rdzv-conf=cas_backoff_max_seconds={value}", *c10d]
    with_torch(OLD)
    assert ours(argv) == ours(c10d)
    with_torch(NEW)
    if value in ("0", "2.5"):
        assert ours(argv) == ours(c10d)
    else:
        assert "cas_backoff_max_seconds: expected seconds" in refusal(argv).what


# -- completion --------------------------------------------------------------------------------------------------------


def completion(shell: str, command: Command) -> str:
    with pytest.raises(HelpAsked) as asked:
        read(["--print-completion", shell], {}, command)
    return str(asked.value)


@pytest.mark.parametrize(
    ("command", "words", "completed"),
    [
        (Command.TORCHRUN, ["odyssey-torchrun", "--log-l"], ["--log-line-prefix-template"]),
        (Command.TORCHRUN, ["odyssey-torchrun", "--nodes"], []),
        (Command.LAUNCH, ["odyssey-torchrun", "--start-method", "fork"], ["fork", "forkserver"]),
        (Command.RUN, ["odyssey", "run", "--survive-"], ["--survive-nodes"]),
        (Command.RUN, ["odyssey", "run", "--numa-binding", "s"], ["socket"]),
    ],
)
def test_bash_completes_what_the_command_takes(
    with_torch: With, tmp_path: Path, command: Command, words: list[str], completed: list[str]
) -> None:
    with_torch(NEW)
    (tmp_path / "completion").write_text(completion("bash", command))
    ask = (
        f"source completion; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        f"_shtab_{words[0].replace('-', '_')} {words[0]} {words[-1]} {words[-2]}; printf '%s\\n' ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [word for word in done.stdout.split() if "_" not in word] == completed


def test_a_link_named_torchrun_is_completed_by_its_name(with_torch: With, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(NEW)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/torchrun"])
    assert completion("bash", Command.TORCHRUN).rstrip().endswith(" torchrun")
    assert "#compdef torchrun" in completion("zsh", Command.TORCHRUN)


def test_without_shtab_and_for_other_shells_there_is_a_way_out(with_torch: With, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(NEW)
    error = refusal(["--print-completion", "basch"])
    assert error.what == "--print-completion: unknown value 'basch'"
    assert error.help is not None and error.help.startswith("did you mean bash?")
    assert refusal(["--print-completion"]).what == "--print-completion needs a value"
    monkeypatch.setitem(sys.modules, "shtab", None)
    error = refusal(["--print-completion", "bash"])
    assert (error.what, error.help) == ("--print-completion needs the package shtab", "pip install shtab")
