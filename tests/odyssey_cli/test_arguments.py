"""What may stand on a command line, and what is said when it can't be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from odyssey.errors import UsageError
from odyssey.plan.layout import parse_layout
from odyssey_cli.__main__ import main
from odyssey_cli.command_line import values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3600", 3600), ("90s", 90), ("15m", 900), ("15min", 900), ("6h", 21600), ("1h30m", 5400), ("2d", 172800), ("0.5", 0.5)],
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert values.duration_s(text, "--mtbf") == seconds


@pytest.mark.parametrize("text", ["", "soon", "h", "6 h", "-3", "0", "0s", "1e3"])
def test_a_wrong_duration_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="--mtbf: expected"):
        values.duration_s(text, "--mtbf")


@pytest.mark.parametrize(("text", "ranks"), [("2x4", 8), ("3+2+3", 8), ("1x1", 1), ("5", 5), ("3+2x4", 11)])
def test_layouts_say_how_many_ranks_they_take(text: str, ranks: int) -> None:
    assert sum(parse_layout(values.layout(text)) or ()) == ranks


@pytest.mark.parametrize("text", ["2y", "0x4", "2x", "3+", "+3", "3+0", "2x4x2", ""])
def test_a_wrong_layout_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="expected auto, 2x4 or 3"):
        values.layout(text)


@pytest.mark.parametrize(("text", "ranks"), [("2", (2,)), ("1,5", (1, 5)), ("4-6,1", (4, 5, 6, 1))])
def test_ranks_are_lists_and_ranges(text: str, ranks: tuple[int, ...]) -> None:
    assert values.ranks(text, "--fail-ranks") == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "1,,2", "-1"])
def test_wrong_ranks_are_explained(text: str) -> None:
    with pytest.raises(UsageError):
        values.ranks(text, "--fail-ranks")


@pytest.mark.parametrize(
    ("given", "value", "rest"),
    [
        (["--steps", "5"], None, ("--steps", "5")),
        (["--nodes", "4", "--steps", "5"], "4", ("--steps", "5")),
        (["--steps", "5", "--nodes=4"], "4", ("--steps", "5")),
        (["--", "--nodes", "4"], None, ("--", "--nodes", "4")),
        (["--nodes"], None, ("--nodes",)),
    ],
)
def test_nodes_behind_the_script_are_found(given: list[str], value: str | None, rest: tuple[str, ...]) -> None:
    assert values.nodes_behind_script(given) == (value, rest)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`train.py` in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.json").write_text("{")
    return "train.py"


TWO = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1")
WRONG = [
    (["run"], "no script given", "odyssey run --nodes 4 train.py"),
    (["run", "trian.py"], "no such script: trian.py", "did you mean train.py?"),
    (["run", "missing.py"], "no such script: missing.py", "no such file in"),
    (["run", "folder"], "folder is a directory, expected a script", "name a Python script"),
    (["run", "--nodes", "0", "train.py"], "--nodes: expected at least 1, got 0", "--nodes 1"),
    (["run", "--nodes", "x", "train.py"], "--nodes: expected a whole number, got 'x'", "for example --nodes 1"),
    (["run", "train.py", "--nodes", "x"], "--nodes: expected a number, got 'x'", "odyssey run --nodes 4 train.py"),
    (["run", "train.py", "--nodes", "²"], "--nodes: expected a number, got '²'", "odyssey run --nodes 4 train.py"),
    (["run", "--nproc_per_node", "0", "train.py"], "--nproc-per-node: expected at least 1, got 0", "--nproc-per-node 1"),
    (["run", "--max-restarts=-1", "train.py"], "--max-restarts: expected at least 0, got -1", "--max-restarts"),
    (["run", "--layout", "2y", "train.py"], "--layout: expected auto, 2x4 or 3+2+3, got '2y'", "two pipelines of four"),
    (["run", "--layout", "2x4", "train.py"], "--layout 2x4 takes 8 ranks, there is 1", "--nodes 8"),
    (["run", "--spares", "1", "train.py"], "--spares 1: there is 1 rank", "--nodes 2"),
    (["run", "--nodes", "3", "--nproc-per-node", "2", "--spares", "6", "train.py"], "--spares 6: there are 6", "--nodes 4"),
    (["run", "--spares=-1", "train.py"], "--spares: expected at least 0, got -1", "--spares 1"),
    (["run", "--nodes", "4", "--spares", "1", "--layout", "2x2", "train.py"], "--layout 2x2 takes 4 ranks", "--nodes 5"),
    (["run", "--mtbf", "soon", "train.py"], "--mtbf: expected a duration, got 'soon'", "3600, 90s"),
    (["run", "--strategy", "rerout", "train.py"], "--strategy: unknown strategy 'rerout'", "did you mean reroute?"),
    (["run", "--drill", "kill", "train.py"], "--drill '", "for example: --drill"),
    (["run", "--drill", "step=3 kill=9", "train.py"], "--drill '", "for example: --drill"),
    (["run", *TWO, "--drill", "step=3 kill=2", "train.py"], "--drill 'step=3 kill=2': kill=2: there", "for example: --drill"),
    (["run", "--profile", "none.json", "train.py"], "--profile: none.json: No such file or directory", "odyssey profile"),
    (["run", "--profile", "broken.json", "train.py"], "--profile: broken.json: ", "measure it again"),
    (["run", "--nodse", "3", "train.py"], "no such option: --nodse", "did you mean --nodes?"),
    (["run", "--node", "3", "train.py"], "--node-rank 3: there is one agent, number 0", "--nodes N are nodes on this host"),
    (["run", "--nodes"], "--nodes needs a value", "--help"),
    (["run", "--master-port", "99999", "train.py"], "--master-port: expected 0 to 65535, got 99999", "free port"),
    (["rnu", "train.py"], "no such command: rnu", "did you mean run?"),
    (["train.py"], "no such command: train.py", "odyssey run train.py"),
    (["plan", "--fail", "0"], "--fail: expected at least 1, got 0", "--fail 1"),
    (["plan", "--fail", "1", "--fail-ranks", "2"], "--fail and --fail-ranks exclude each other", "one of them"),
    (["plan", "--fail-ranks", "x"], "--fail-ranks: expected rank numbers, got 'x'", "--fail-ranks 1,5"),
    (["plan", "--nodes", "0"], "--nodes: expected at least 1, got 0", "--nodes 1"),
    (["plan", "nowhere.json"], "nowhere.json: no such file", "odyssey profile train.py"),
    (["plan", "folder"], "folder: no events.jsonl in it or below it", "odyssey profile train.py"),
    (["plan"], "nothing to plan with: no profile.json and no job in odyssey-logs here", "odyssey profile train.py"),
]


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(("argv", "what", "help"), WRONG, ids=[" ".join(argv) for argv, _, _ in WRONG])
def test_a_wrong_command_line_ends_with_two_lines_and_code_2(
    argv: list[str], what: str, help: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)

    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 2), err
    assert lines[0].startswith(f"error: {what}")
    assert lines[1].startswith("help: ") and help in lines[1]
    assert not lines[0].endswith(".")


def test_an_error_of_our_own_keeps_its_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("odyssey_cli.run.read", lambda *_: 1 / 0)

    code = main(["run", script])

    err = capfd.readouterr().err
    assert code == 70
    assert "Traceback" in err and "error: odyssey itself failed: ZeroDivisionError" in err and "please report it" in err


def test_help_is_quick_and_fits_80_columns(capfd: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["run"], ["profile"], ["plan"]):
        assert main([*command, "--help"]) == 0
        out = capfd.readouterr().out
        assert "Usage: odyssey" in out
        assert max(map(len, out.splitlines())) <= 80
