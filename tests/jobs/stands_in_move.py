"""Does what tests/jobs/resilient.py does: `stands_in_move.py RANK MARK FOLDER VARIANT ...`.

When state has come to rank RANK for the first time it leaves the file MARK, and stands there until that generation is cut.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odyssey.runtime import layers
from tests.jobs import resilient


def stand_in_move(rank: int, mark: Path) -> None:
    move = layers.move_layers

    def standing(moves, worker, model, groups):
        moved = move(moves, worker, model, groups)
        if worker == rank and moved.n_bytes and not mark.exists():
            mark.touch()
            groups.waiter.wait(threading.Event().wait)
        return moved

    layers.move_layers = standing


if __name__ == "__main__":
    stand_in_move(int(sys.argv.pop(1)), Path(sys.argv.pop(1)))
    resilient.main()
