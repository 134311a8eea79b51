"""What the agents of a job agree on: one log of entries that no loss of a minority takes back. Raft, without I/O or clock.

membership.py  who votes, and which of them are enough
messages.py    entries of the log, and what agents say to each other
log.py         the entries that one agent holds
node.py        one agent's part: who leads, and what is heard from whom; candidacy.py: when it would lead itself
leadership.py  what it does while it leads: replication, commits, changes of the membership

Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm" (2014), and Ongaro's thesis "Consensus: Bridging
Theory and Practice" (2014) for pre-votes (9.6), leaders that step down without a quorum (6.2), joint consensus (4.3), learners
(4.2.1) and the hand-over of leadership (3.10). See docs/internals/consensus.md.
"""
