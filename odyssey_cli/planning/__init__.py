"""Plans and profiles without a job.

plan.py    `odyssey plan`
source.py  what it plans with
ask.py     what it asks of the search
answer.py  how the answer looks; predicted.py: its steps as a picture
starts.py  layouts to start with, and ranks that stand by; start_tables.py: how they look
profile.py `odyssey profile`
"""
