"""Commands on jobs that run or have run on this host.

find.py    which job is meant; agents.py: who is in it
conversation.py questions to its agents on any host
status.py  `odyssey ps`, `odyssey status`
logs.py    `odyssey logs`
stop.py    `odyssey stop`; leave.py: `odyssey leave`
stacks.py  `odyssey stacks`
timeline.py `odyssey timeline`
picture.py a job as SVG; json_report.py: its failure as JSON
"""
