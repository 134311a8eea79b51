"""What was measured (Profile), and what a Plan costs at these measurements: step time, memory, transition, goodput.

May import `odyssey.plan`, `odyssey.protocol` and `odyssey.errors`, and no torch. Data flows one way:

    Measured -> merge -> Profile -> price(plan, costs) -> Estimate

In reading order: the rooms `profile/`, `step/`, `transition/` and `goodput/`; price.py, which puts a plan's price together of
them; refine.py, by which a profile learns from what really happens.
"""
