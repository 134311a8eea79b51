"""From a command line that starts ranks, and the environment, to RunOptions: everything is checked, nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TypeVar

from launcher.options import Entry, OnLoss, RunOptions
from launcher.processes.rank_process import imports_odyssey
from odyssey.errors import ProfileError, UsageError
from odyssey_cli import files
from odyssey_cli.command_line import checks
from odyssey_cli.command_line import values as text
from odyssey_cli.command_line.from_slurm import filled, told
from odyssey_cli.command_line.options import NUMA_BINDINGS, OPTIONS, START_METHODS, Command, Origin
from odyssey_cli.command_line.parser import Given, parse
from odyssey_cli.command_line.rendezvous import RendezvousOptions, meeting
from odyssey_cli.display import quantities
from odyssey_cli.slurm.step import Step
from strategies.situation import Aim

T = TypeVar("T")
U = TypeVar("U")
MIN_DETECT_S, MAX_DETECT_S = 0.5, 600.0


@dataclass(frozen=True)
class LaunchRequest:
    """What a command line asks for.
    `notes`: what the user should be told before the start. `step`: of SLURM, where what it says is part of what is asked
    for. `answer`: where a check is to write what it has found, for programs."""

    options: RunOptions
    wants_display: bool
    notes: tuple[str, ...]
    step: Step | None = None
    answer: Path | None = None


@dataclass(frozen=True)
class _Where:
    """The ranks of this agent, and how it meets others."""

    nodes: int
    ranks_per_node: int
    together: RendezvousOptions

    @property
    def n_ranks(self) -> int | None:
        """None where other agents have ranks as well."""
        return self.nodes * self.ranks_per_node if self.together.max_agents == 1 else None


def read(argv: Sequence[str], environment: Mapping[str, str], command: Command) -> LaunchRequest:
    """Raises UsageError for what cannot be meant or cannot be run, and HelpAsked for `--help`."""
    given, step = filled(parse(argv, environment, command))
    checks.working_directory()
    entry = _entry(given)
    interpreter = _interpreter(given, entry)
    if command.has_script:
        checks.entry(given.script, entry, interpreter)
    nodes, arguments, notes = _nodes(given)
    together = meeting(given)
    where = _Where(nodes, _ranks_per_node(given), together)
    _check_where(given, where)
    log_dir, note = checks.log_dir(given.value("log_dir").text, given.value("log_dir").name, environment)
    _check_without_effect(given)
    options = _options(replace(given, arguments=arguments), entry, interpreter, where, log_dir)
    # Scripts that know nothing of us draw on the terminal themselves: it is theirs, as under torchrun.
    wants_display = command is Command.RUN and not given.switch("no_display") and imports_odyssey(options)
    if options.n_spares and not imports_odyssey(options):
        notes += (f"--spares: {given.script} does not import odyssey; ranks stand by in an odyssey.Job, else all of them run",)
    from_slurm = (told(given, step),) if step is not None and options.verbose else ()
    answer = files.check_if_given(given.value("json").text or None, "--json")
    return LaunchRequest(options, wants_display, (*notes, *([note] if note else []), *from_slurm), step, answer)


def _options(given: Given, entry: Entry, interpreter: str, where: _Where, log_dir: Path) -> RunOptions:
    """A line an option."""
    return RunOptions(
        script=given.script,
        arguments=given.arguments,
        entry=entry,
        interpreter=interpreter,
        passes_local_rank=given.command is Command.LAUNCH and not given.switch("use_env"),
        numa_binding=_if_given(given, "numa_binding", partial(text.choice, known=NUMA_BINDINGS), ""),
        virtual_local_rank=given.switch("virtual_local_rank"),
        role=given.value("role").text,
        n_nodes=where.nodes,
        n_ranks_per_node=where.ranks_per_node,
        min_agents=where.together.min_agents,
        max_agents=where.together.max_agents,
        rendezvous=where.together.rendezvous,
        master_addr=where.together.master_addr,
        master_port=where.together.master_port,
        node_rank=where.together.node_rank,
        run_id=where.together.run_id,
        join_timeout_s=where.together.join_timeout_s,
        last_call_s=where.together.last_call_s,
        local_addr=given.value("local_addr").text,
        detect_s=_detect_s(given),
        secret_file=_if_any(given, "secret_file", lambda words, _: Path(words)),
        checks_hosts=given.switch("check"),
        max_restarts=_whole(given, "max_restarts", 0),
        on_loss=OnLoss(_read(given, "on_loss", partial(text.choice, known=tuple(OnLoss)))),
        never_retry=_if_given(given, "never_retry", text.exit_codes, ()),
        restart_limit=_if_given(given, "restart_limit", text.restart_limit, None),
        restart_backoff_s=_read(given, "restart_backoff", text.delay_s),
        retries_same_failure=_retries_same_failure(given),
        log_dir=log_dir,
        keep_bytes=_whole(given, "keep_output", 0) << 20 if given.command is Command.RUN else 0,
        redirects=_read(given, "redirects", text.streams),
        tee=_read(given, "tee", text.streams),
        shown_ranks=_shown_ranks(given),
        stdout_filters=_if_given(given, "duplicate_stdout_filters", text.words, ()),
        stderr_filters=_if_given(given, "duplicate_stderr_filters", text.words, ()),
        line_prefix=_line_prefix(given),
        logs_specs=given.value("logs_specs").text,
        event_log_handler=given.value("event_log_handler").text,
        stdin_rank=_stdin_rank(given, where.n_ranks),
        json_report=_if_any(given, "json_report", files.check),
        verbose=given.switch("verbose"),
        ending_signals=_ending_signals(given),
        forwarded_signals=_forwarded_signals(given),
        shutdown_timeout_s=_read(given, "shutdown_timeout", text.delay_s),
        stall_timeout_s=_if_given(given, "stall_timeout", text.duration_s, None),
        ends_stalled=_ends_stalled(given),
        layout=text.layout(given.value("layout").text),
        n_spares=_whole(given, "spares", 0),
        strategy=text.strategy(given.value("strategy").text),
        mtbf_s=_if_given(given, "mtbf", text.duration_s, None),
        failure_rate=_if_given(given, "failure_rate", _failure_rate, None),
        aim=_aim(given),
        drills=given.texts.get("drill", ()),
        profile=_if_given(given, "profile", _profile, None),
        write_profile=Path(given.value("output").text) if given.command is Command.PROFILE else None,
    )


# -- what to run -------------------------------------------------------------------------------------------------------


def _entry(given: Given) -> Entry:
    """`--run-path` takes precedence, as it does for torchrun."""
    if given.switch("run_path"):
        return Entry.PATH
    if given.switch("no_python"):
        if given.switch("module"):
            raise UsageError("--no-python and --module exclude each other", "leave one of them out")
        if given.command is Command.LAUNCH and not given.switch("use_env"):
            raise UsageError("--no-python needs --use-env", "a program is given no --local-rank")
        return Entry.PROGRAM
    return Entry.MODULE if given.switch("module") else Entry.SCRIPT


def _interpreter(given: Given, entry: Entry) -> str:
    name = given.environment.get("PYTHON_EXEC", "")
    return checks.interpreter(name) if name and entry in (Entry.SCRIPT, Entry.MODULE) else ""


def _check_without_effect(given: Given) -> None:
    """Options that change nothing here still have to be right."""
    method, interval = given.value("start_method"), given.value("monitor_interval")
    text.choice(method.text, method.name, START_METHODS)
    try:
        float(interval.text)
    except ValueError:
        raise UsageError(
            f"{interval.name}: expected seconds, got {interval.text!r}", "leave it out, nothing is polled"
        ) from None


# -- where -------------------------------------------------------------------------------------------------------------


def _nodes(given: Given) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """How many, the script's arguments, and notes.

    All that stands behind the script is its own, but for `--nodes N` where no option stands before the script.
    """
    if given.command in (Command.RUN, Command.PROFILE) and not given.texts:
        value, rest = text.nodes_behind_script(given.arguments)
        if value is not None:
            if not value.isdecimal():
                help = f"for example: {given.command.value} --nodes 4 {given.script}"
                raise UsageError(f"--nodes: expected a number, got {value!r}", help)
            nodes = text.count(int(value), "--nodes", 1)
            note = (
                f"took --nodes {nodes} as the launcher's; to give it to the script, write "
                f"`{given.command.value} --nodes 1 {given.script} --nodes {nodes}`"
            )
            return nodes, rest, (note, *_passed_on(replace(given, arguments=rest)))
    return _whole(given, "nodes", 1), given.arguments, _passed_on(given)


def _passed_on(given: Given) -> tuple[str, ...]:
    """A note of options that are the launcher's by name, and the script's by their place."""
    if given.command not in (Command.RUN, Command.PROFILE):
        return ()
    ours = {
        spelling: option.is_switch
        for option in OPTIONS
        if option.origin is not Origin.TORCHRUN and option.is_of(given.command)
        for spelling in option.spellings
        if spelling.startswith("--")
    }
    found: list[str] = []
    arguments = takewhile(lambda argument: argument != "--", given.arguments)
    for argument, follower in pairwise([*arguments, ""]):
        name, equals, _ = argument.partition("=")
        if name in ours:
            has_value = not ours[name] and not equals and follower
            found.append(f"{argument} {follower}" if has_value else argument)
    if not found:
        return ()
    return (f"note: {', '.join(found)} behind {given.script} {'were' if len(found) > 1 else 'was'} passed to it",)


def _ranks_per_node(given: Given) -> int:
    value = given.value("nproc_per_node")
    if value.text.isidentifier():
        from odyssey_cli.command_line import devices

        return devices.count(value.text, value.name, given.environment)
    try:
        number = int(value.text)
    except ValueError:
        help = f"for example {text.example_of(value.name, '4')}"
        raise UsageError(f"{value.name}: expected a number, auto, cpu, gpu or xpu, got {value.text!r}", help) from None
    return text.count(number, value.name, 1)


def _check_where(given: Given, where: _Where) -> None:
    nodes, together = where.nodes, where.together
    if nodes > 1 and together.max_agents > 1:
        nnodes = given.value("nnodes")
        raise UsageError(
            f"--nodes {nodes} and {nnodes.name} {nnodes.text} exclude each other",
            "--nodes are parts of this host under one agent; --nnodes are agents, each with --nproc-per-node ranks",
        )
    if together.max_agents == 1:
        text.layout_of(given.value("layout").text, nodes, where.ranks_per_node, _whole(given, "spares", 0))
    for drill in given.texts.get("drill", ()):
        from launcher.agent.drills import parse as parse_drill

        parse_drill(drill, n_nodes=nodes * together.max_agents, n_ranks_per_node=where.ranks_per_node)
    checks.open_files(nodes * where.ranks_per_node)


# -- losses and ends ---------------------------------------------------------------------------------------------------


def _retries_same_failure(given: Given) -> bool:
    """With torchrun's options alone nobody can ask for it, and some count on it."""
    return given.switch("retry_same_failure") or given.command in (Command.TORCHRUN, Command.LAUNCH)


def _failure_rate(words: str, option: str) -> float:
    try:
        return text.failure_rate(float(words))
    except ValueError:
        raise UsageError(f"{option}: expected losses per node-day, got {words!r}", "for example 0.0065") from None


def _aim(given: Given) -> Aim:
    whole = text.whole
    survive, survive_nodes = (_if_given(given, name, partial(whole, least=0), None) for name in ("survive", "survive_nodes"))
    rank, steps = (_if_given(given, name, partial(whole, least=1), None) for name in ("low_rank", "low_rank_steps"))
    approximate = text.low_rank(given.switch("allow_approximate"), rank, steps)
    return text.aim(Aim(), given.value("objective").text, given.value("protect").text, approximate, survive, survive_nodes)


def _detect_s(given: Given) -> float:
    detect, seconds = given.value("detect"), _read(given, "detect", text.delay_s)
    if not MIN_DETECT_S <= seconds <= MAX_DETECT_S:
        what = f"{detect.name}: expected {MIN_DETECT_S:g} s to {MAX_DETECT_S:g} s, got {detect.text}"
        raise UsageError(what, "5s is right for most networks")
    return seconds


def _ends_stalled(given: Given) -> bool:
    ends = given.switch("end_stalled")
    if ends and not given.value("stall_timeout").is_given:
        raise UsageError("--end-stalled needs --stall-timeout", "for example --stall-timeout 10m --end-stalled")
    return ends


def _forwarded_signals(given: Given) -> tuple[str, ...]:
    names = _read(given, "forward_signals", text.signals)
    if "SIGINT" in names:
        raise UsageError(
            f"{given.value('forward_signals').name}: SIGINT ends the job, always", "forward another one, for example SIGUSR1"
        )
    return names


def _ending_signals(given: Given) -> tuple[str, ...]:
    """Without those that are only to be passed on."""
    value = given.value("signals_to_handle")
    ending = text.signals(value.text, value.name)
    both = set(ending) & set(_forwarded_signals(given))
    if both and value.is_given:
        raise UsageError(f"{min(both)} cannot both end the job and only be passed on", f"leave it out of {value.name}")
    return tuple(name for name in ending if name not in both)


def _profile(words: str, option: str) -> Path:
    from perfmodel.profile.profile import read as read_profile

    path = Path(words)
    try:
        read_profile(path)
    except ProfileError as error:
        raise UsageError(f"{option}: {error.what}", error.help) from None
    return path


# -- output ------------------------------------------------------------------------------------------------------------


def _shown_ranks(given: Given) -> frozenset[int]:
    value = given.value("local_ranks_filter")
    try:
        ranks = [int(part) for part in value.text.split(",")] if value.text else []
    except ValueError:
        ranks = [-1]
    if any(rank < 0 for rank in ranks):
        help = f"for example {text.example_of(value.name, '0,1')}"
        raise UsageError(f"{value.name}: expected local ranks, got {value.text!r}", help)
    return frozenset(ranks)


def _line_prefix(given: Given) -> str:
    prefix = given.value("log_line_prefix_template").text
    return prefix or given.environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")


def _stdin_rank(given: Given, n_ranks: int | None) -> int | None:
    """`n_ranks`: None where other agents have ranks as well."""
    if not given.value("stdin_rank").is_given:
        return None
    rank = _whole(given, "stdin_rank", 0)
    if n_ranks is not None and rank >= n_ranks:
        there_are = quantities.there_are(n_ranks, "rank")
        raise UsageError(f"--stdin-rank {rank}: {there_are}, numbered from 0", f"give 0 to {n_ranks - 1}")
    return rank


def _whole(given: Given, dest: str, least: int) -> int:
    return _read(given, dest, partial(text.whole, least=least))


def _read(given: Given, dest: str, meaning: Callable[[str, str], T]) -> T:
    """`meaning`: of a text, given by an option of this name."""
    value = given.value(dest)
    return meaning(value.text, value.name)


def _if_given(given: Given, dest: str, meaning: Callable[[str, str], T], otherwise: U) -> T | U:
    return _read(given, dest, meaning) if given.value(dest).is_given else otherwise


def _if_any(given: Given, dest: str, meaning: Callable[[str, str], T]) -> T | None:
    """None for an empty text."""
    return _read(given, dest, meaning) if given.value(dest).text else None
