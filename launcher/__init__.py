"""Agents: they spawn ranks, watch them, log what happens, decide with the coordinator, and leave nothing behind.

May import `strategies`, `perfmodel`, `odyssey.plan`, `odyssey.messages` and `odyssey.zygote`'s requests, and no torch.

    options.py      what a run was asked            events.py       the log's vocabulary
    state.py        what the coordinator knows      coordinator.py  (state, event) -> (state, actions), pure
    actions.py      what it wants done              gate.py         what must agree before anything runs
    agent.py        one job on one host             loop.py         descriptors and timers
    spawn.py        processes of ranks              environment.py  their variables
    store.py        the address of the job's store  logs.py         the job's folder
    planning.py     situations and look-ups         ahead.py        plans computed before they are needed
    progress.py     hangs                           drill.py        faults on purpose
    replay.py       the same decisions from a log
"""
