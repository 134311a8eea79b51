"""The agent that leads: who comes to its job, who is lost, and all ranks of the job, wherever they are.

roster.py    who has come, who is refused; host_comparison.py: whose host is left out
quorum.py    until there are enough
leader.py    takes others in; sessions.py: what connects them; silence.py: who is silent; remote_agent.py: one of them;
             notices.py: what it says to people
cluster.py   all ranks of the job: one way to address them
inspection.py what they do, asked of each agent
"""
