"""The help of the commands that typer reads, and the examples in every command's help."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from odyssey_cli.__main__ import main
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.parser import parse
from odyssey_cli.commands import app

COMMANDS = typer.main.get_group(app).commands
LAUNCHES = {command.value.removeprefix("odyssey "): command for command in (Command.RUN, Command.PROFILE, Command.CHECK)}


def shown(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(list(arguments)) == 0
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["replay", "leave"])
def test_help_reads_like_this(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parent / f"help_{name}.txt"

    assert shown(capfd, name, "-h") == shown(capfd, name, "--help") == golden.read_text().splitlines()


@pytest.mark.parametrize("name", [*COMMANDS])
def test_help_has_one_style(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    lines = shown(capfd, name, "--help")

    assert lines[0].startswith(f"Usage: odyssey {name} [OPTIONS]") and "[[" not in lines[0]
    assert any(line.startswith("  -h, --help  ") and "Print this" in line for line in lines)
    assert max(map(len, lines)) <= 80
    for line in lines:
        assert "<" not in line and "[default:" not in line, line


def test_help_of_all_names_every_command(capfd: pytest.CaptureFixture[str]) -> None:
    lines = shown(capfd)

    assert lines == shown(capfd, "--help")
    assert [
        line.split()[0] for line in lines[lines.index("Commands:") + 1 : lines.index("Options:") - 1] if line[2] != " "
    ] == [*COMMANDS]


@pytest.mark.parametrize("name", ["run", "profile", "check", "plan", "rehearse", "replay"])
def test_the_examples_of_the_help_are_command_lines(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    examples = [shlex.split(line)[1:] for line in shown(capfd, name, "--help") if line.startswith("$ ")]

    assert 2 <= len(examples) <= 3
    for program, command, *arguments in examples:
        assert (program, command) == ("odyssey", name)
        if name in LAUNCHES:
            assert parse(arguments, {}, LAUNCHES[name])
        else:
            assert COMMANDS[name].make_context(name, arguments).params
