"""Which torch is installed here, read without importing it: what torchrun's command line takes is a matter of its version."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path


@cache
def installed() -> tuple[int, int]:
    """`2, 15`; zeros where there is none."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        file = Path(folder) / "version.py"
        match = re.search(r"^__version__ = '(\d+)\.(\d+)", file.read_text(), re.MULTILINE) if file.is_file() else None
        if match is not None:
            return int(match[1]), int(match[2])
    return 0, 0


def spelled(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
