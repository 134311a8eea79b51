"""Agents: they spawn ranks, watch them, log what happens, decide with the coordinator, and leave nothing behind.

May import `strategies`, `perfmodel`, `odyssey.plan`, `odyssey.messages` and `odyssey.zygote`'s requests, and no torch: only
logs_specs.py and torch_events.py do, where they are asked for.

    options.py      what a run was asked            events.py       the log's vocabulary
    state.py        what the coordinator knows      coordinator.py  (state, event) -> (state, actions), pure
    decision.py     what it answers, and the end    transition.py   its part from a pause to go
    plain.py        scripts that build no Job       gate.py         what must agree before anything runs
    rank_failure.py a script fails on one rank      next_job.py     one Job after another
    actions.py      what it wants done              replay.py       the same decisions from a log
    agent.py        one job on one host             loop.py         descriptors and timers
    processes.py    of ranks, zygote and store      ends.py         how processes end
    spawn.py        how processes are started       environment.py  their variables
    reports.py      what ranks say, as events       signals.py      what the launcher is told to do
    store.py        the address of the job's store  logs.py         the job's folder
    streams.py      what ranks read and write       console.py      the terminal, line by line
    logs_specs.py   other people's log folders      torch_events.py torchrun's events, for its handlers
    profiling.py    the profile, kept true          progress.py     hangs
    waits.py        what is waited for, and ways out awaited.py     of ranks and the store; vitals.py: what /proc tells
    planning.py     situations and look-ups         ahead.py        plans computed before they are needed
    drill.py        faults on purpose               faults.py       when they strike
"""
