"""From the text of a command line's values to what they mean. Each function raises UsageError with a way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from odyssey.errors import UsageError

STRATEGIES = ("auto", "reroute", "repartition", "shrink", "respawn")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str, option: str) -> float:
    """Seconds: `3600`, `90s`, `15m`, `6h`, `1h30m`, `2d`."""
    help = "give seconds, or a number with a unit: 3600, 90s, 15m, 6h, 1h30m, 2d"
    if re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(text)
    else:
        if not re.fullmatch(r"(\d+(\.\d+)?(ms|s|min|m|h|d))+", text):
            raise UsageError(f"{option}: expected a duration, got {text!r}", help)
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d)", text)
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise UsageError(f"{option}: expected more than 0 seconds, got {text!r}", help)
    return seconds


def layout(text: str) -> str:
    """`auto`, `2x4` (pipelines x stages), `3+2+3` (stages of each pipeline) or both, `3+2x4`."""
    if text != "auto" and not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*(\+([1-9]\d*x)?[1-9]\d*)*", text):
        raise UsageError(
            f"--layout: expected auto, 2x4 or 3+2+3, got {text!r}",
            "2x4 is two pipelines of four stages; 3+2+3 is three pipelines of three, two and three stages",
        )
    return text


def layout_ranks(text: str) -> int:
    """How many ranks an explicit layout takes."""
    runs = [part.rpartition("x") for part in text.split("+")]
    return sum(int(pipelines or 1) * int(stages) for pipelines, _, stages in runs)


def strategy(text: str) -> str:
    """`auto` or the name of a strategy."""
    if text not in STRATEGIES:
        near = difflib.get_close_matches(text, STRATEGIES, 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"--strategy: unknown strategy {text!r}", f"{hint}one of: {', '.join(STRATEGIES)}")
    return text


def count(number: int, option: str, least: int) -> int:
    """A number of at least `least`."""
    if number < least:
        raise UsageError(f"{option}: expected at least {least}, got {number}", f"for example {option} {max(least, 1)}")
    return number


def ranks(text: str, option: str) -> tuple[int, ...]:
    """`1,5` or `1-3,7`: distinct rank numbers, in the order given."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UsageError(f"{option}: expected rank numbers, got {text!r}", f"for example {option} 1,5 or {option} 4-7")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option}: a rank is named twice in {text!r}", "name each rank once")
    return tuple(numbers)


def script(text: str) -> str:
    """The path of a training script that exists."""
    path = Path(text)
    if path.is_file():
        return text
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return text
        inside = sorted(file.name for file in path.glob("*.py"))[:3]
        help = f"name a script in it: {', '.join(str(path / name) for name in inside)}" if inside else "name a Python script"
        raise UsageError(f"{text} is a directory, expected a script", help)
    parent = path.parent if path.parent.is_dir() else Path()
    names = [file.name for file in parent.glob("*.py")]
    near = difflib.get_close_matches(path.name, names, 3, 0.6)
    if near:
        help = f"did you mean {' or '.join(str(parent / name) for name in near)}?"
    else:
        help = f"there is no such file in {parent.resolve()}"
    raise UsageError(f"no such script: {text}", help)


def nodes_behind_script(arguments: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The value of the last `--nodes N` (or `--nodes=N`) among the script's arguments, and the arguments without it."""
    value: str | None = None
    rest: list[str] = []
    i = 0
    while i < len(arguments):
        argument = arguments[i]
        if argument == "--":
            rest += arguments[i:]
            break
        if argument == "--nodes" and i + 1 < len(arguments):
            value = arguments[i + 1]
            i += 2
        elif argument.startswith("--nodes="):
            value = argument.removeprefix("--nodes=")
            i += 1
        else:
            rest.append(argument)
            i += 1
    return value, tuple(rest)
