"""Learned imports: which installed modules a script had imported by its first step, and having them ready in a zygote.

A rank tells once (`tell_at_first_step`). The next zygote imports the same (`import_all`) and sees what a module does
meanwhile that a fork could not take back: reads a variable that differs between ranks, starts a thread, initialises CUDA,
fails. Such a module is left out, with all that import it, but for those that `repair` sets right in the fork. Variables that
modules set at import a fork has, too.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from odyssey import own_process

ENDING_S = 0.02
"""A thread that was joined may still be seen for a moment."""
MAX_PAUSE_S = 0.5
"""After each import it sleeps as long as the import took, up to this: the ranks need the processors more."""


# -- in a rank ---------------------------------------------------------------------------------------------------------


def tell_at_first_step() -> None:
    """Report Stepped when the script's first optimizer step is done. Costs nothing after that."""
    if "torch.optim.optimizer" not in sys.modules:
        return
    n_known = len(sys.modules)
    torch = sys.modules["torch"]
    hooks = sys.modules["torch.optim.optimizer"]
    pid = os.getpid()

    def tell(*_: object) -> None:
        if torch.compiler.is_compiling() or not handles:
            return
        if next(reversed(hooks._global_optimizer_post_hooks)) != handles[0].id:
            return  # the script has added hooks behind it: they are being called, none may be removed now
        handles.pop().remove()
        if os.getpid() == pid:
            from odyssey.protocol.link import connect
            from odyssey.protocol.reports import Stepped

            link = connect()
            if link is not None:
                link.report(Stepped(tuple(installed(n_known))))

    handles = [hooks.register_optimizer_step_post_hook(tell)]


def installed(n_known: int) -> Iterator[str]:
    """Modules imported after the first `n_known`, in the order of their import, that came with Python or were installed for it.

    Those before are not looked at: to hold thousands for a moment writes to pages that a fork has from the zygote, and copies
    them.
    """
    import site
    import sysconfig

    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    prefixes = tuple(folder + os.sep for folder in folders)
    try:
        new = list(islice(reversed(sys.modules.items()), max(0, len(sys.modules) - n_known)))
    except RuntimeError:  # another thread imports something
        new = list(sys.modules.items())[: n_known - 1 : -1]
    for name, module in reversed(new):
        spec = getattr(module, "__spec__", None)
        if name.partition(".")[0] == "odyssey" or getattr(spec, "name", None) != name:
            continue
        origin = getattr(spec, "origin", None)
        if origin in ("built-in", "frozen") or (isinstance(origin, str) and origin.startswith(prefixes)):
            yield name


# -- in a zygote -------------------------------------------------------------------------------------------------------


def import_all(modules: Iterable[str], variables: Collection[str]) -> dict[str, str]:
    """Import `modules`, one after the other. Answers those that must be left out, and why; then this process serves no one.

    `variables`: names of those whose values differ between ranks, or between starts of a rank.
    """
    watch = _Watch(variables)
    before = dict(os.environb)
    with watch:
        for name in modules:
            if is_left_out(name, watch.left_out):
                continue
            started = time.monotonic()
            watch.last = name
            try:
                importlib.import_module(name)
            except BaseException as error:  # SystemExit too: it would end the zygote
                watch.leave_out(f"{type(error).__name__} when imported alone", [name])
            watch.look()
            time.sleep(min(time.monotonic() - started, MAX_PAUSE_S))
    for variable in before.keys() | os.environb.keys():
        if before.get(variable) != os.environb.get(variable):
            _variables_set.append((variable, before.get(variable), os.environb.get(variable)))
    return watch.left_out


_variables_set: list[tuple[bytes, bytes | None, bytes | None]] = []
"""Variables that modules have set or removed at import: their names, and their values before and behind it."""


def is_left_out(name: str, left_out: Collection[str]) -> bool:
    """Whether `name` or a package that it is in is left out."""
    while name:
        if name in left_out:
            return True
        name = name.rpartition(".")[0]
    return False


def has_cuda() -> bool:
    """This process has initialised CUDA, by torch or otherwise: a fork could not use it."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    return any(name.startswith("/dev/nvidia") for _, name in own_process.descriptors())


class _Watch:
    """Sees what modules do while they are imported. It is the first finder that the import system asks."""

    def __init__(self, variables: Collection[str]) -> None:
        self.left_out: dict[str, str] = {}
        self.last = ""
        """The module whose import has begun last."""
        self._variables = frozenset(variables)
        self._n_threads = own_process.n_threads()
        self._has_cuda = has_cuda()
        self._environ: Any = type(os.environ)

    def __enter__(self) -> None:
        watch, base = self, self._environ

        class Watched(base):  # type: ignore[misc, valid-type]
            def __getitem__(self, key: str) -> str:
                if key in watch._variables:
                    watch.was_read(key)
                return super().__getitem__(key)  # type: ignore[no-any-return]

        os.environ.__class__ = Watched
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        os.environ.__class__ = self._environ

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        self.look()
        self.last = name

    def look(self) -> None:
        """Has anything happened since the last time?"""
        if own_process.n_threads() > self._n_threads:
            time.sleep(ENDING_S)
        if (now := own_process.n_threads()) > self._n_threads:
            self._n_threads = now
            self.leave_out("starts a thread", [*_importing(), self.last])
        if not self._has_cuda and has_cuda():
            self._has_cuda = True
            self.leave_out("initialises CUDA", [*_importing(), self.last])

    def was_read(self, variable: str) -> None:
        importing = _importing()
        if threading.current_thread() is threading.main_thread() and not (importing and importing[0] in REPAIRS):
            self.leave_out(f"reads {variable}", importing or [self.last])

    def leave_out(self, why: str, names: Iterable[str]) -> None:
        for name in names:
            self.left_out.setdefault(name, why)


def _importing() -> list[str]:
    """Modules whose code runs now, innermost first."""
    frame: types.FrameType | None = sys._getframe()
    names = []
    while frame is not None:
        if frame.f_code.co_name == "<module>" and (name := frame.f_globals.get("__name__")) != "__main__":
            names.append(str(name))
        frame = frame.f_back
    return names


# -- in a fork ---------------------------------------------------------------------------------------------------------


def repair() -> None:
    """Set right what modules have kept of variables that they read at import, and set those that they set there.

    A rank's own value stays: a module may have set the variable only where it was not set.
    """
    for variable, before, behind in _variables_set:
        if os.environb.get(variable) != before:
            continue
        if behind is not None:
            os.environb[variable] = behind
        else:
            del os.environb[variable]
    for name, set_right in REPAIRS.items():
        if (module := sys.modules.get(name)) is not None:
            set_right(module)


def _rank_zero(module: Any) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _rank_zero_of_torchmetrics(module: Any) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


REPAIRS: dict[str, Callable[[Any], None]] = {
    "lightning.fabric.utilities.rank_zero": _rank_zero,
    "lightning_fabric.utilities.rank_zero": _rank_zero,
    "torchmetrics.utilities.prints": _rank_zero_of_torchmetrics,
}
"""Modules that read a rank's variables at import, and what to do about it in the fork."""
