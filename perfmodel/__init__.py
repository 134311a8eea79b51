"""What was measured (Profile), and what a Plan costs at these measurements: step time, memory, transition, objective.

May import `odyssey.plan`, `odyssey.protocol` and `odyssey.errors`, and no torch. Data flows one way:

    Measured -> merge -> Profile -> price(plan, profile) -> Estimate
"""
