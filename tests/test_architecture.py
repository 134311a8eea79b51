"""The arrows between packages, what may be loaded when, and the lists of names that others rely on."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

OURS = {"odyssey", "perfmodel", "strategies", "launcher", "odyssey_cli", "configs"}
PLAN_SIDE = {"odyssey.plan", "odyssey.protocol", "odyssey.kernel", "odyssey.errors", "odyssey.text", "odyssey.codec"}
"""What both sides speak: the parts of `odyssey` that planning may import."""

MAY_IMPORT: dict[str, set[str]] = {
    "odyssey": set(),
    "perfmodel": {"configs", *PLAN_SIDE},
    "strategies": {"perfmodel", *PLAN_SIDE},
    "launcher": {"strategies", "perfmodel", "odyssey", "configs", *PLAN_SIDE},
    "odyssey_cli": {"launcher", "strategies", "perfmodel", "odyssey", "configs", *PLAN_SIDE},
}
HEAVY = {"torch", "numpy", "scipy"}


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All that is in the file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in the file, those inside functions and `if TYPE_CHECKING` included."""
    package = path.relative_to(ROOT).parent.as_posix().replace("/", ".")
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_allowed(module: str, package: str) -> bool:
    parts = module.split(".")
    if parts[0] not in OURS or parts[0] == package:
        return True
    prefixes = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return bool(prefixes & MAY_IMPORT[package]) or module == "odyssey.__version__"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_down(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, module in imports_of(path)
        if not is_allowed(module, package)
    ]

    assert wrong == []


FLOORS: dict[str, tuple[str, ...]] = {
    "odyssey": (
        "text errors own_process control_group kernel tracebacks",
        "codec",
        "plan",
        "protocol",
        "model",
        "runtime",
        "profiling",
        "sharding",
        "joining checkpoints",
        "job",
        "replicas",
        "zygote",
    ),
    "perfmodel": ("profile goodput", "step", "transition", "price refine"),
    "strategies": ("situation", "building", "*", "search"),
    "launcher": (
        *("options consensus", "host", "joblog", "failures", "coordinator", "output health", "planning processes"),
        *("cluster", "agent"),
    ),
    "odyssey_cli": (
        "own_packages errors files",
        "display slurm",
        "command_line",
        "timeline",
        "jobs check",
        "planning",
        "replay submission",
        "run",
        "rehearsal",
        "launch torchrun commands",
        "__main__",
    ),
}
"""The rooms of each package, and the files beside them, from the lowest floor up; rooms of one floor know nothing of each
other. `*`: files that are not named."""


def modules_of(package: str) -> dict[str, Path]:
    """Module -> file; a package's own name stands for its `__init__`."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def targets_of(path: Path, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, module of the same package) of every import."""
    for line, name in imports_of(path):
        parent = name.rpartition(".")[0]
        if name in modules or parent in modules:
            yield line, name if name in modules else parent


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_rooms_import_only_from_rooms_below_them(package: str) -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms.split()}
    modules = modules_of(package)

    def floor(room: str) -> int:
        return floor_of.get(room, floor_of.get("*", len(floor_of)))

    wrong = []
    for module, path in modules.items():
        room = module.split(".")[1] if "." in module else ""
        for line, target in targets_of(path, modules):
            its = target.split(".")[1] if "." in target else ""
            if (
                its
                and room
                and its != room
                and floor(its) >= floor(room)
                and not (room not in floor_of and its not in floor_of)
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line} ({room}) imports {target}")

    assert wrong == []
    assert not set(floor_of) - {"*"} - {module.split(".")[1] for module in modules if "." in module}, "a room that is not there"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    """Also not by an import inside a function, or for types only."""
    modules = modules_of(package)
    imports = {module: {t for _, t in targets_of(path, modules)} - {module} for module, path in modules.items()}
    left = dict(imports)
    while free := [module for module, its in left.items() if not its & left.keys()]:
        for module in free:
            del left[module]

    assert left == {}


def beyond_the_limits(path: Path) -> Iterator[str]:
    """Names of functions of more than 60 lines, and of classes of more than 15 attributes or fields."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and node.end_lineno - node.lineno >= 60:
            yield node.name
        elif isinstance(node, ast.ClassDef):
            fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            fields |= {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
            if len(fields) > 15:
                yield node.name


def test_what_is_long_has_a_written_reason() -> None:
    _, _, reasons = (ROOT / "docs/internals/architecture.md").read_text().partition("## Beyond the limits")
    paths = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
    found = {(path.relative_to(ROOT).as_posix(), name) for path in paths for name in beyond_the_limits(path)}

    assert {(path, name) for path, name in found if f"`{name}`" not in reasons} == set()


OF_TORCH = {"ReplicaGroup"}
"""Most of its methods are those that torch calls."""


def test_no_class_has_more_than_25_methods() -> None:
    found = {
        node.name
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and sum(isinstance(part, ast.FunctionDef) for part in node.body) > 25
    }

    assert found == OF_TORCH


def test_the_top_of_the_launcher_is_a_dozen_rooms_at_most() -> None:
    entries = {path.name for path in (ROOT / "launcher").iterdir()} - {"__init__.py", "__pycache__"}

    assert len(entries) <= 12


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_rooms_docstring_names_every_file_in_it(package: str) -> None:
    unnamed = []
    for init in sorted((ROOT / package).glob("*/__init__.py")):
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        files = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
        unnamed += [f"{init.parent.relative_to(ROOT)}/{name}" for name in sorted(files) if name not in docstring]

    assert unnamed == []


def comments_of(path: Path) -> Iterator[str]:
    """Comments, those on lines behind each other as one."""
    last = 0
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(block)


def texts_of(path: Path) -> Iterator[str]:
    """What can be read by itself: docstrings, what stands below a name, comments, and what the help says of options."""
    for node in nodes_of(path):
        of_option = isinstance(node, ast.Call) and ast.unparse(node.func) in ("Option", "option", "switch", "typer.Argument")
        parts = (node,) if isinstance(node, ast.Expr) else ast.walk(node) if of_option else ()
        for part in parts:
            its = part.value if isinstance(part, ast.Expr) else part
            if isinstance(its, ast.Constant) and isinstance(its.value, str):
                yield its.value
    yield from comments_of(path)


def test_no_sentence_begins_with_a_word_that_leaves_open_who_does_what() -> None:
    """In the code and on the pages. A question may ask who."""
    begins = re.compile(r"(?:^|[.!:;|] |\n\n\s*|- )((?:Of|Who|Whoever|What there is) [^.?]*[.?]?)")
    texts = {page: page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
    for room in [*MAY_IMPORT, "benchmarks"]:
        for path in (ROOT / room).rglob("*.py"):
            texts[path] = "\n\n".join(texts_of(path))
    found = [(str(path.relative_to(ROOT)), sentence) for path, text in texts.items() for sentence in begins.findall(text)]

    assert [(path, sentence) for path, sentence in found if not sentence.endswith("?")] == []


def test_only_handles_send_signals() -> None:
    """By its number alone nobody is signalled: it may be another process's by then. A process may end itself, or be asked
    whether it may be signalled."""
    senders = {"os.kill", "os.killpg", "signal.pidfd_send_signal"}
    names = {sender.rpartition(".")[2] for sender in senders}
    allowed = {"launcher/host/handle.py", "odyssey_cli/jobs/stop.py", "odyssey/protocol/link.py", "odyssey_cli/jobs/find.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node) in senders
    }

    assert found == allowed


def test_no_strategy_imports_another() -> None:
    """What two of them need lies in strategies/building; nor do they know of the search, or of who the others are."""
    may_import = {
        "strategies/situation/*.py": ("strategies.situation.",),
        "strategies/building/*.py": ("strategies.building.", "strategies.situation."),
        "strategies/*.py": ("strategies.building.", "strategies.situation."),
    }
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for pattern, known in may_import.items()
        for path in sorted(ROOT.glob(pattern))
        for line, module in imports_of(path)
        if module.partition(".")[0] == "strategies" and not module.startswith(known)
    ]

    assert wrong == []


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_no_file_is_named_for_being_a_leftover(package: str) -> None:
    names = {path.stem for path in (ROOT / package).rglob("*.py")}

    assert not names & {"utils", "helpers", "common", "misc", "util", "base"}


def test_files_and_rooms_have_the_fields_words_and_not_those_of_their_builders() -> None:
    """Each of these was a name once, and told only those who knew it what lies there."""
    given_up = {
        *("alike", "beside", "broadcasts", "card", "cells", "dial", "door", "draft", "foreseen", "from_outside", "greeting"),
        *("kept", "news", "once", "outlook", "prospect", "reception", "running", "separable", "shadow", "terms", "uneven"),
        *("visitors", "walk", "whole", "worth"),
    }
    paths = [path.relative_to(ROOT) for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")]

    assert [path.as_posix() for path in paths if given_up & {*path.with_suffix("").parts}] == []


def test_proc_is_read_in_one_file_on_each_side() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/proc")
    }

    assert found == {"launcher/host/proc.py", "odyssey/own_process.py"}


def modules_after(statement: str) -> set[str]:
    """What is in memory after `statement` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def loaded_after(statement: str) -> set[str]:
    """Its top-level packages."""
    return {name.partition(".")[0] for name in modules_after(statement)}


@pytest.mark.parametrize(
    "statement",
    [
        "import odyssey",
        "import odyssey.plan.plan, odyssey.plan.schedule, odyssey.protocol.orders, odyssey.protocol.reports, odyssey.errors",
        "import odyssey_cli.__main__",
        "import odyssey_cli.run, odyssey_cli.display.screen, launcher.joblog.events, launcher.options",
        "import launcher.agent.start",
    ],
)
def test_the_way_to_the_first_rank_loads_nothing_heavy(statement: str) -> None:
    assert not loaded_after(statement) & HEAVY


def test_a_training_script_loads_none_of_the_launcher() -> None:
    loaded = loaded_after("import odyssey, odyssey.plan.plan, odyssey.plan.schedule; odyssey.Job")

    assert not loaded & (OURS - {"odyssey"})


@pytest.mark.parametrize("options", [[], ["--strategy", "reroute"]])
def test_a_command_line_is_read_without_loading_strategies(options: list[str]) -> None:
    loaded = modules_after(
        "import odyssey_cli.run, launcher.agent.start\n"
        "from odyssey_cli.command_line.request import Command, read\n"
        f"read({[*options, 'tests/jobs/train.py']}, {{}}, Command.RUN)"
    )

    assert {name for name in loaded if name.startswith("strategies")} <= {
        "strategies",
        "strategies.situation",
        "strategies.situation.faults",
    }


def test_exports_of_odyssey_are_these() -> None:
    import odyssey

    assert sorted(odyssey.__all__) == ["Job", "Step", "heartbeat", "layers_of", "resilient", "shard_mesh"]
    assert {*dir(odyssey)} == {*odyssey.__all__, "__version__"}


COMMANDS = {
    "run": {"--help"},
    "profile": {"--help"},
    "check": {"--help"},
    "plan": {
        "--fail", "--fail-nodes", "--fail-ranks", "--failure-rate", "--help", "--join", "--join-nodes", "--json", "--layout",
        "--mtbf", "--nodes",
        "--nproc-per-node", "--objective", "--strategy", "--survive", "--survive-nodes", "--svg", "--timeline", "--trace",
        "--change", "--layouts", "--spares", "--spare-nodes", "--horizon", "--protect",
        "--allow-approximate",
    },
    "rehearse": {
        "--drill", "--help", "--jitter", "--json", "--layout", "--log-dir", "--max-restarts", "--mtbf", "--no-display",
        "--nodes", "--nproc-per-node", "--objective", "--seed", "--slow", "--spares", "--speed", "--steps",
        "--strategy", "--trace", "--protect", "--allow-approximate",
    },
    "replay": {
        "--checkpoint-every", "--days", "--help", "--json", "--layout", "--mtbf", "--nodes", "--nproc-per-node", "--objective",
        "--policy",
        "--repair", "--restart", "--save", "--seed", "--svg", "--trace-nodes", "--transient", "--protect",
        "--allow-approximate",
    },
    "ps": {"--all", "--help", "--json"},
    "status": {"--help", "--json"},
    "stop": {"--help", "--now"},
    "leave": {"--help", "--within"},
    "logs": {"--follow", "--help", "--rank"},
    "stacks": {"--help", "--whole"},
    "slurm": {
        "--account", "--cpus-per-task", "--elastic", "--gpus-per-node", "--help", "--job-name", "--nodes", "--output",
        "--partition", "--requeue", "--sbatch", "--signal", "--submit", "--time",
    },
    "timeline": {"--generation", "--help", "--no-prediction", "--svg", "--trace", "--change"},
}  # fmt: skip
"""The command lines of `run`, `profile` and `check` are not typer's, see LAUNCH_OPTIONS."""


def test_commands_and_options_are_these() -> None:
    import typer

    from odyssey_cli.commands import app

    commands = typer.main.get_group(app).commands

    assert {
        name: {option for param in command.params for option in param.opts if option.startswith("--")} | {"--help"}
        for name, command in commands.items()
    } == COMMANDS


OWN_OPTIONS = {
    "--check", "--detect", "--drill", "--end-stalled", "--failure-rate", "--forward-signals", "--json-report", "--layout",
    "--mtbf", "--never-retry", "--no-display", "--nodes", "--objective", "--profile", "--restart-backoff", "--restart-limit",
    "--retry-same-failure", "--secret-file", "--spares", "--stall-timeout", "--stdin-rank", "--strategy", "--survive",
    "--survive-nodes", "--protect", "--verbose", "--on-loss", "--allow-approximate", "--low-rank", "--low-rank-steps",
    "--keep-output",
}  # fmt: skip
"""What `odyssey run` has beside torchrun's options. tests/odyssey_cli/test_launch_arguments.py holds these against torchrun's
parser."""
PROFILE_OPTIONS = {"--log-dir", "--master-addr", "--master-port", "--nodes", "--nproc-per-node", "--output"}
CHECK_OPTIONS = {
    "--detect", "--json", "--local-addr", "--log-dir", "--master-addr", "--master-port", "--nnodes", "--node-rank",
    "--nproc-per-node", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--secret-file", "--standalone",
}  # fmt: skip


def test_options_of_a_launch_are_these() -> None:
    from odyssey_cli.command_line.options import OPTIONS, Command, Origin

    assert {option.name for option in OPTIONS if option.origin is Origin.OURS} == OWN_OPTIONS
    assert {option.name for option in OPTIONS if option.is_of(Command.PROFILE)} == PROFILE_OPTIONS
    assert {option.name for option in OPTIONS if option.is_of(Command.CHECK)} == CHECK_OPTIONS


def test_a_run_without_a_display_loads_neither_typer_nor_rich() -> None:
    statement = "import odyssey_cli.__main__, odyssey_cli.torchrun, odyssey_cli.run, launcher.agent.start"

    assert not loaded_after(statement) & {"typer", "rich", "click", "psutil", "yaml"}
