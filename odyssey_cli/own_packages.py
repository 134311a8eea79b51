"""Where this program finds its own packages, whatever else is called as they are.

`launcher`, `strategies`, `perfmodel` and `configs` are names that users' projects have as well. So beside other people's code
only `odyssey` and `odyssey_cli` are installed; the others lie below odyssey_cli/_packages in a wheel, and beside odyssey_cli
in the source tree. Programs of ours, which all begin with `import odyssey_cli`, look for them there before anywhere else,
`PYTHONPATH=.` or not. Ranks never import odyssey_cli: to a script these names mean its own.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_BESIDE = Path(__file__).resolve().parent.parent
_BELOW = _BESIDE / "odyssey_cli" / "_packages"
_FOLDERS = {"odyssey": str(_BESIDE)} | dict.fromkeys(
    ("configs", "launcher", "perfmodel", "strategies"), str(_BELOW if _BELOW.is_dir() else _BESIDE)
)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        folder = _FOLDERS.get(name)
        return PathFinder.find_spec(name, [folder]) if folder is not None else None


def find_first() -> None:
    """Have our packages found where they are ours, and everything else where it is installed rather than where we run.

    `python -m odyssey_cli` has put the working directory, the user's, before the standard library.
    """
    sys.meta_path.insert(0, _Finder)
    if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
