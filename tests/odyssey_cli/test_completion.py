"""Completion of command lines, asked for as the scripts that shells load do."""

from __future__ import annotations

import pytest

from odyssey_cli.__main__ import main
from odyssey_cli.command_line.completion import completions
from odyssey_cli.command_line.options import OPTIONS, Command


def asked(line: str, shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """What a shell is answered for this line, with the cursor at its end."""
    monkeypatch.setenv("_ODYSSEY_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - (not line.endswith(" "))))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    return capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("odyssey re", ["rehearse", "replay"]),
        ("odyssey run --no", ["--no-python", "--nodes", "--node-rank", "--no-display"]),
        ("odyssey profile --ou", ["--output"]),
        ("odyssey run --nproc-per-node 4 --on-loss ", ["restart", "continue", "auto"]),
        ("odyssey run --standalone --tee ", []),
        ("odyssey run train.py --no", []),
        ("odyssey run ", []),
        ("odyssey plan --fail-n", ["--fail-nodes"]),
    ],
)
def test_bash_is_told_what_a_word_may_become(
    line: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where it is told nothing it completes files."""
    assert asked(line, "bash", monkeypatch, capfd).split() == words


def test_zsh_and_fish_are_told_what_an_option_does_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    zsh = asked("odyssey check --standa", "zsh", monkeypatch, capfd)
    fish = asked("odyssey check --standa", "fish", monkeypatch, capfd)
    (option,) = (its for its in OPTIONS if its.name == "--standalone")
    assert zsh.startswith('_arguments \'*: :(("--standalone":') and fish == f"--standalone\t{option.help}\n"


@pytest.mark.parametrize("command", [Command.RUN, Command.PROFILE, Command.CHECK])
def test_every_option_is_completed(command: Command) -> None:
    known = {name for option in OPTIONS if option.is_of(command) for name in option.names}
    assert {name for name, _ in completions(command, [], "-")} == known | {"--help"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown(
    shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit) as end:
        main(["--show-completion", shell])
    assert end.value.code == 0
    script = capfd.readouterr().out
    assert f"_ODYSSEY_COMPLETE=complete_{shell}" in script
