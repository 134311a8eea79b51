"""Files of a script's that hide modules which the zygote has imported already: `calendar.py` beside train.py.

A process of its own looks into the script's folder first, and so does torch when it imports `calendar` there. A fork has the
standard library's, and so has torch in it: nothing sets that right afterwards.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Collection
from importlib.machinery import PathFinder

import odyssey


def first_folder(entry: str, script: str) -> str | None:
    """What Python puts before everything else on sys.path in order to run `script` here; None for nothing."""
    if entry == "script" and pkgutil.get_importer(script) is not None:
        return os.path.abspath(script)  # a directory or zip file with the script in it
    if sys.flags.safe_path:
        return None
    if entry == "script":
        return os.path.dirname(os.path.realpath(script))
    if entry == "path":
        return ""
    try:
        return os.getcwd()
    except OSError:
        return None  # it is gone


def find_shadow(entry: str, script: str, at_start: Collection[str]) -> str:
    """The file that hides a module that is here already; empty if there is none. It costs some milliseconds.

    `at_start`: modules that any interpreter has before it looks at the script, and so takes from elsewhere.
    """
    try:
        folder = first_folder(entry, script)
        folder = os.getcwd() if folder == "" else folder
    except OSError:
        return ""  # the working directory is gone: nothing is found there
    was_known = folder in sys.path_importer_cache
    try:
        places = [folder] if folder is not None else []
        for name in sorted({name.partition(".")[0] for name in sys.modules}.difference(at_start)):
            path = [*places, *sys.path] if name == odyssey.__name__ else places  # it is here wherever it was found
            spec = PathFinder.find_spec(name, path)
            origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
            if spec is None or spec.loader is None or spec.origin is None or origin in ("built-in", "frozen"):
                continue
            if origin is None or os.path.realpath(spec.origin) != os.path.realpath(origin):
                return spec.origin
        return ""
    finally:
        if not was_known and folder is not None:
            sys.path_importer_cache.pop(folder, None)  # what it knows of the folder would be old in the ranks
