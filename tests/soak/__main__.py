"""`python -m tests.soak 17`: one job by its seed; with `--faults 1000` as many jobs, from this seed on, as it takes; with
`--sequences 1` the sequence of changes of this seed (sequences.py), with `--sequences 300` as many, from it on; likewise with
`--protected 1` its job in one pipeline whose ranks keep each other's layers, `--ddp 1` its job of an unchanged script, and
`--resilient 1` that of a script's own model (loops.py)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.soak import loops, soak
from tests.supervised import supervise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=1000, help="of the first job")
    parser.add_argument("--faults", type=int, default=0, help="go on with the next seeds until so many have struck")
    parser.add_argument("--sequences", type=int, default=0, help="run so many of them, and no other jobs")
    parser.add_argument("--protected", type=int, default=0, help="run so many jobs of one protected pipeline, and no others")
    parser.add_argument("--ddp", type=int, default=0, help="run so many jobs of an unchanged script, and no others")
    parser.add_argument("--resilient", type=int, default=0, help="run so many jobs of a script's own model, and no others")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run beside each other")
    parser.add_argument("--folder", type=Path, help="for the folders of the jobs; those of failed ones are kept")
    options = parser.parse_args()
    supervise("soak")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="odyssey-soak-"))
    os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    for kind in loops.VARIANTS:
        if n_jobs := getattr(options, kind):
            return 1 if any(each.why for each in loops.soak(kind, options.seed, n_jobs, folder)) else 0
    if options.sequences:
        total = soak.soak_sequences(options.seed, options.sequences, folder, options.at_once)
    elif options.protected:
        total = soak.soak_protected(options.seed, options.protected, folder, options.at_once)
    else:
        total = soak.soak(options.seed, options.faults, folder, options.at_once)
    print(total)
    return 1 if total.bad else 0


if __name__ == "__main__":
    sys.exit(main())
