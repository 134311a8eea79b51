"""Runs in a fork of the zygote what `python -u …` would run in a process of its own, so that no script sees a difference.

become(…)  the process: directory, environment, streams, name, randomness
run(…)     the script: a file, a directory or zip file, a module, or through runpy.run_path
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import functools
import importlib.machinery
import io
import logging
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

from odyssey import own_process
from odyssey.text import as_unicode
from odyssey.zygote.protocol import RUN_PATH, STACKS_FILE, STACKS_SIGNAL, Entry, command
from odyssey.zygote.shadowing_modules import first_folder

GROUP_END_S = 0.05
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def become(cwd: bytes, environment: dict[bytes, bytes], streams: Sequence[int]) -> None:
    """Take directory, environment and streams of the rank, and nothing from the zygote that every process has for itself.

    `cwd`: empty to stay where the zygote is.
    """
    if cwd:
        os.chdir(cwd)
    os.environb.clear()
    os.environb.update(environment)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)  # inheritable, as these three have to be
        os.close(descriptor)
    _own_randomness()
    _own_threads()
    _own_start()
    _tell_stacks()
    _let_groups_end()
    _keep_groups()


def run(entry: Entry, script: str, arguments: Sequence[str], mask: Collection[int]) -> None:
    """Run it as `__main__`. Raises what the script raises; the interpreter's own end follows, as it would there.

    `mask`: signals that it is to block; until here all are.
    The exception then unwinds through the zygote's frames, which `sys.excepthook` is not to see.
    """
    sys.orig_argv[:] = [sys.executable, *command(entry, script, arguments)]
    _name_process()
    sys.argv[:] = [script, *arguments]
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __loader__=importlib.machinery.BuiltinImporter, __annotations__={})
    sys.modules["__main__"] = main
    body, first_file = _body(entry, script, main)
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what was sent since comes now, and ends it as what is being started
    try:
        signal.signal(signal.SIGINT, on_interrupt)
        body()
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = trace = _from(first_file, error.__traceback__)
        _report(error)
        hook = sys.excepthook
        if isinstance(error, KeyboardInterrupt):  # of all ranks at once: Ctrl-C; if it was not, the agent tells of it
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the interpreter, at its very end, ends itself with it
            hook = _say_nothing if hook is sys.__excepthook__ else hook

        def show(kind: type[BaseException], error: BaseException, _: types.TracebackType | None) -> None:
            sys.last_traceback = error.__traceback__ = trace
            hook(kind, error, trace)

        sys.excepthook = show
        raise


def _say_nothing(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Instead of as many tracebacks as there are ranks."""


def _body(entry: Entry, script: str, main: types.ModuleType) -> tuple[Callable[[], object], str]:
    """What runs it, and the file name of the first frame that a traceback shows."""
    run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # what the interpreter itself calls
    if (folder := first_folder(entry, script)) is not None:
        sys.path.insert(0, folder)
    match entry:
        case "module":
            sys.argv[0] = "-m"
            return lambda: run_as_main(script, True), "<frozen runpy>"
        case "path":
            sys.argv.insert(0, "-c")
            return lambda: exec(compile(RUN_PATH, "<string>", "exec", dont_inherit=True), vars(main)), "<string>"
        case "script" if pkgutil.get_importer(script) is not None:
            return lambda: run_as_main("__main__", False), "<frozen runpy>"
        case "script":
            path = os.path.abspath(script)
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __loader__=loader, __cached__=None)
            return lambda: exec(_compiled(path), vars(main)), path


def _compiled(path: str) -> types.CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _from(file: str, trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first frame of `file` on; none for a script that does not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace


def _report(error: BaseException) -> None:
    """Tell the agent what happened, in full: it prints the first failure's traceback even where streams are mixed."""
    from odyssey.protocol.link import report_failure

    try:
        report_failure(error)
    except Exception as why:
        print(f"odyssey: could not report the failure: {why}", file=sys.stderr)


def _own_randomness() -> None:
    """Generators that a process seeds at random must not be the zygote's: ranks would draw the same numbers."""
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads) > 0:
            torch.set_num_threads(int(threads))  # OMP reads the variable only once, at import


def _own_threads() -> None:
    """numpy's OpenBLAS counts its threads once, as it is loaded: in the zygote it was to have one. They are the processors, or
    the fewer that variables say."""
    if "numpy" not in sys.modules or "OPENBLAS_NUM_THREADS" in os.environ:
        return
    threads, n_processors = os.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    n = min(int(threads), n_processors) if threads.isdecimal() and int(threads) > 0 else n_processors
    if n == 1:
        return
    for path in own_process.libraries("openblas"):
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        for name in _SET_THREADS:
            if (set_threads := getattr(library, name, None)) is not None:
                set_threads(n)


_SET_THREADS = tuple(f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "_64", ""))
"""By what it was built for: numpy's own wheels, scipy's, distributions."""


def _own_start() -> None:
    """`%(relativeCreated)d` of log records counts from the import of logging; and a thread's number outside of Python is known
    from its start."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    logging._startTime = time.time() if sys.version_info < (3, 13) else time.time_ns()  # type: ignore[attr-defined]


def _tell_stacks() -> None:
    """Be ready to tell where this rank is, even while it hangs in C, to whom ptrace is forbidden (launcher/health/stacks.py).

    A realtime signal that nobody else uses, and a file that has no name and goes with the process: all that a script
    could see of it is a descriptor, and the signal's disposition. Both end with exec.
    """
    file = os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def _let_groups_end() -> None:
    """Give the thread of a Gloo group a moment for the last collective, before the group is destroyed.

    To free a tensor that Python made it needs the interpreter lock. If a DDP replica is the last to hold the group, its end
    joins that thread with the lock held, and neither goes on (torch 2.9 to 2.13). A process of its own nearly always wins
    this race; a fork, whose first writes copy pages, loses it now and then.
    """
    distributed = sys.modules.get("torch.distributed")
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or module is None or not distributed.is_available():
        return
    destroy = module.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*arguments: Any, **named: Any) -> Any:
        time.sleep(GROUP_END_S)
        return destroy(*arguments, **named)

    for place in (distributed, module):
        place.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def _keep_groups() -> None:
    """As the entry point of torch has it where a process imports torch by itself (odyssey/replicas)."""
    if os.environ.get("ODYSSEY_ON_LOSS", "restart") != "restart":
        from odyssey.replicas.install import install_if_asked

        install_if_asked()


def _name_process() -> None:
    """`ps` and `pkill -f` show the script's command line; `top` and `pgrep` the interpreter's name, as ever."""
    from setproctitle import setproctitle

    setproctitle(as_unicode(" ".join(sys.orig_argv)))
    _libc.prctl(_PR_SET_NAME, os.path.basename(sys.executable).encode()[:15], 0, 0, 0)
