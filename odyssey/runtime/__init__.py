"""One rank at work, of a Job above all.

session.py    the rank's side of the recovery protocol, unit by unit; transaction.py: what a unit is; passed_units.py: those
              that a rank has missed
phase.py      where a rank stands in it, and what may follow; control.py: kept for two threads, one of which hears the agent
runner.py     what it works with: a Runner and its State; layers.py, engine.py: those of a Job
local.py      a script that is run without a launcher
engine.py     runs the ops of a plan; exchange.py: what passes between its stages, boundary.py: and of which shapes
computation.py what an op comes to, halves.py: where the backward is split; backend.py: computed, or otherwise
approximate.py a backward in less, where a plan says so, and what others make up for
data.py       samples and seeds; sampler.py: in which order; batches.py: those of a job; prefetcher.py: read ahead,
              and handed_out.py: whether a script has changed them
streams.py    data that can only be iterated over; first_look.py: what they are like; snapshots.py: where others read on
clock.py      what computing takes; recorder.py: when the ops of a step ran
groups.py     communication that can be cut; waiter.py: by a thread that waits; transport.py: how groups are made;
              sum_group.py: and what of it goes on; tree.py: between many ranks; works.py: who lets go last;
              cut.py: what is said when it is cut;
              connections.py: its sockets, and how to shut them;
              nccl.py: what NCCL must not be left to; introductions.py: how ranks learn where they reach each other, and
              peers.py: that who is connected is the one that was meant
gradients.py  what is summed over it; tally.py: of which samples; reductions.py: bucket by bucket, while the backward computes
agreement.py  by which all are in one unit, and have one result;
metrics.py    what is told of the samples beside the loss; agreed_numbers.py: which numbers ranks have in common, by a sum
transfer.py   layers on their way between ranks; peer_memory.py: read where they lie, on one host;
              neighbour_memory.py: whose
evaluation.py, run_once.py: what is run instead of a step
job_spec.py   what the script asked for
proof.py      what a rank shows before it goes on; comparison.py: and once more, when its script has gone on with what came
heartbeat.py  for loops of one's own; script_group.py: what such a script has in the place of a group of torch's
"""
