"""Where a search spends its time (plain.py), compiled where that was possible when this was installed.

It knows no workers: who calls it gives each a row (perfmodel/step/computations.py, strategies/building/ordering.py).

The compiled module has the digest of its source in its name, so it is never that of another source: whoever edits plain.py runs
plain.py until the next installation. `ODYSSEY_KERNEL=plain` asks for the source in any case. Which one is in use:

    python -c 'from odyssey import kernel; print(kernel.IS_COMPILED)'
"""

from __future__ import annotations

import hashlib
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

SOURCE = Path(__file__).with_name("plain.py")


def compiled_name(source: bytes) -> str:
    """Name the module that is compiled from it, in this package."""
    return f"_compiled_{hashlib.sha256(source).hexdigest()[:16]}"


if TYPE_CHECKING:
    from odyssey.kernel import plain as _chosen
else:
    try:
        if os.environ.get("ODYSSEY_KERNEL") == "plain":
            raise ImportError("plain was asked for")
        _chosen = import_module(f"{__name__}.{compiled_name(SOURCE.read_bytes())}")
    except ImportError:
        from odyssey.kernel import plain as _chosen

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""By number."""
N_GRADIENTS_SENT = _chosen.N_GRADIENTS_SENT
IS_COMPILED = not (_chosen.__file__ or "").endswith(".py")

Cost = _chosen.Cost
Group = _chosen.Group
Messages = _chosen.Messages
Part = _chosen.Part
Scheduler = _chosen.Scheduler
Tasks = _chosen.Tasks
Walk = _chosen.Walk
Walker = _chosen.Walker
reduced_s = _chosen.reduced_s
