"""From the text of a command line's values to what they mean. Each function raises UsageError with a way out."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import strategies
from launcher.options import Std
from odyssey.errors import UsageError
from odyssey.plan.approximation import LowRank
from odyssey.plan.layout import parse_layout
from odyssey.plan.worker import Rank, numbers_from
from odyssey_cli.display import quantities
from strategies.situation import Aim, Objective, Protect

MOST_RANKS = 1 << 20
"""No cluster has more: what is reckoned for each of them would find no time or memory."""
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


def duration_s_if_given(text: str | None, option: str) -> float | None:
    """The same, or None."""
    return None if text is None else duration_s(text, option)


def delay_s(text: str, option: str) -> float:
    """Seconds as of `duration_s`, or 0."""
    return 0.0 if re.fullmatch(r"0+(\.0+)?(ms|s|min|m|h|d)?", text) else duration_s(text, option)


def layout(text: str) -> str:
    """`auto`, `2x4` (pipelines x stages), `3+2+3` (stages of each pipeline) or both, `3+2x4`."""
    try:
        parse_layout(text)
    except UsageError:
        raise UsageError(
            f"--layout: expected auto, 2x4 or 3+2+3, got {text!r}",
            "2x4 is two pipelines of four stages; 3+2+3 is three pipelines of three, two and three stages",
        ) from None
    return text


def layout_of(text: str, nodes: int, ranks_per_node: int, n_spares: int) -> str:
    """The same for so many ranks, of which some stand by."""
    n_taken, n_ranks = sum(parse_layout(layout(text)) or ()), nodes * ranks_per_node
    if n_spares >= n_ranks:
        help = f"one at least has to train: start more ranks, for example --nodes {n_spares // ranks_per_node + 1}"
        raise UsageError(f"--spares {n_spares}: {quantities.there_are(n_ranks, 'rank')}", help)
    if n_taken > n_ranks - n_spares:
        standing_by = f", of which {n_spares} {'stand' if n_spares > 1 else 'stands'} by" if n_spares else ""
        raise UsageError(
            f"--layout {text} takes {n_taken} ranks, there {'is' if n_ranks == 1 else 'are'} {n_ranks}{standing_by}",
            f"start more ranks, for example --nodes {-(-(n_taken + n_spares) // ranks_per_node)}",
        )
    return text


def strategy(text: str) -> str:
    """`auto` or the name of a strategy."""
    if text == "auto":
        return text
    return choice(text, "--strategy", ("auto", *strategies.names()), "strategy")


def aim(
    told: Aim,
    objective: str | None,
    protect: str | None,
    approximate: LowRank | None,
    survive: int | None = None,
    survive_nodes: int | None = None,
) -> Aim:
    """What the best plan is: as asked for, or else as `told` before."""
    return Aim(
        told.objective if objective is None else Objective(choice(objective, "--objective", tuple(Objective))),
        told.survive if survive is None else count(survive, "--survive", 0),
        told.survive_nodes if survive_nodes is None else count(survive_nodes, "--survive-nodes", 0),
        told.protect if protect is None else Protect(choice(protect, "--protect", tuple(Protect))),
        told.approximate if approximate is None else approximate,
    )


def low_rank(allowed: bool, rank: int | None = None, refresh_steps: int | None = None) -> LowRank | None:
    """How gradients may be approximate; None: not at all."""
    given = {"--low-rank": rank, "--low-rank-steps": refresh_steps}
    for name, number in given.items():
        if number is not None and not allowed:
            raise UsageError(f"{name} without --allow-approximate", "give both; docs/strategies.md says what neighbour does")
        if number is not None:
            count(number, name, 1)
    if not allowed:
        return None
    return LowRank(rank) if refresh_steps is None else LowRank(rank, refresh_steps)


def failure_rate(number: float) -> float:
    """Losses per node-day, so many that their squares can be computed with."""
    if not 1e-9 <= number <= 1e6:
        raise UsageError(
            f"--failure-rate: expected 1e-9 to 1e6 losses per node-day, got {number:g}",
            "measured are 0.0008 to 0.04; the default is 0.0065",
        )
    return number


def count(number: int, option: str, least: int) -> int:
    """A number of at least `least`."""
    if number < least:
        raise UsageError(
            f"{option}: expected at least {least}, got {number}", f"for example {example_of(option, str(max(least, 1)))}"
        )
    return number


def counts(least: int, given: Mapping[str, int | None]) -> None:
    """Numbers of at least `least` by option, as far as they are given."""
    for option, number in given.items():
        if number is not None:
            count(number, option, least)


def whole(text: str, option: str, least: int | None = None) -> int:
    """A whole number, of at least `least`."""
    try:
        number = int(text)
    except ValueError:
        example = example_of(option, str(max(least or 0, 1)))
        raise UsageError(f"{option}: expected a whole number, got {text!r}", f"for example {example}") from None
    return number if least is None else count(number, option, least)


def example_of(option: str, value: str) -> str:
    """`--nodes 4`, or `PET_NODES=4` for a variable."""
    return f"{option} {value}" if option.startswith("-") else f"{option}={value}"


def choice(text: str, option: str, known: Sequence[str], what: str = "value") -> str:
    """One of these."""
    if text not in known:
        near = difflib.get_close_matches(text, known, 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{option}: unknown {what} {text!r}", f"{hint}one of: {', '.join(known)}")
    return text


def exit_codes(text: str, option: str) -> tuple[int, ...]:
    """`2,70-75`: exit codes of a process, without 0."""
    help = f"exit codes from 1 to 255, for example {option} 2,70-75"
    codes: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if match is None:
            raise UsageError(f"{option}: expected exit codes, got {text!r}", help)
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= 255:
            raise UsageError(f"{option}: {part.strip()} is no exit code of a failure", help)
        codes.update(range(first, last + 1))
    return tuple(sorted(codes))


def restart_limit(text: str, option: str) -> tuple[int, float]:
    """`5/1h`: at most so many in so many seconds."""
    number, slash, time = text.partition("/")
    if not slash or not number.strip().isdecimal():
        raise UsageError(f"{option}: expected N/TIME, got {text!r}", f"five in an hour: {option} 5/1h")
    return int(number), duration_s(time.strip(), option)


def signals(text: str, option: str) -> tuple[str, ...]:
    """`SIGUSR1,SIGUSR2`: names of signals that a process can catch."""
    known = [s.name for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)]
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip().upper())))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name if name.startswith("SIG") else f"SIG{name}", known, 1, 0.6)
            what = "cannot be handled" if name in signal.Signals.__members__ else "is no signal"
            raise UsageError(f"{option}: {name} {what}", f"did you mean {near[0]}?" if near else "for example SIGTERM,SIGUSR1")
    return names


def streams(text: str, option: str) -> Std | dict[int, Std]:
    """`3`, or by local rank `0:1,1:2`: 0 none, 1 stdout, 2 stderr, 3 both."""
    if re.fullmatch("[0-3]", text):
        return Std(int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{option}: expected streams, got {text!r}", "1 is stdout, 2 stderr, 3 both; by local rank: 0:3,1:2")
    parts = [part.split(":") for part in text.split(",")]
    return {int(rank): Std(int(streams)) for rank, streams in parts}


def words(text: str, option: str) -> tuple[str, ...]:
    """`apple,orange`; a doubled comma is a comma in a word."""
    parts = re.split("(,+)", text)
    found = [""]
    for i, part in enumerate(parts):
        if i % 2 == 0:
            found[-1] += part
            continue
        pairs, single = divmod(len(part), 2)
        found[-1] += "," * pairs
        if single:
            found.append("")
    return tuple(found)


def ranks(text: str, option: str) -> tuple[Rank, ...]:
    """`1,5` or `1-3,7`: distinct rank numbers, in the order given."""
    numbers: list[Rank] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UsageError(f"{option}: expected rank numbers, got {text!r}", f"for example {option} 1,5 or {option} 4-7")
        first, last = int(match[1]), int(match[2] or match[1])
        check_n_ranks(last + 1, f"{option} {part.strip()}")
        numbers += numbers_from(Rank(first), last + 1 - first)
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option}: a rank is named twice in {text!r}", "name each rank once")
    return tuple(numbers)


def check_n_ranks(n_ranks: int, option: str) -> None:
    """Not more of them than there can be."""
    if n_ranks > MOST_RANKS:
        raise UsageError(f"{option}: {n_ranks} ranks are more than any cluster has", f"give {MOST_RANKS} at most")


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
