"""What a step of a plan takes, of time and of memory. In reading order:

- costs.py: what one op costs; all_reduce.py: a sum over workers
- independent_groups.py: pipelines that have to do with each other; of groups that are alike one is simulated
- computations.py: a group's computations as the kernel has them, and what became of them
- simulate.py: they run, event by event, on devices or shared cores
- cores.py: how ranks share the cores of a host
- fast_simulate.py: they run on devices, as fast as a search needs it
- reducing.py: when gradients are complete, and the reductions of their buckets
- finish.py: the commit point, and the optimizers
- timeline.py: the times of all ops of a step
- memory.py: peak bytes of a worker
- group_cost.py: what a price needs of a group, worked out once
- work.py: a profile in whole numbers, for the rule `split`
"""
