"""Plans and profiles without a job.

plan.py    `odyssey plan`
source.py  what it plans with
ask.py     what it asks of the search
answer.py  how the answer looks; predicted.py: its steps as a picture
starts.py  layouts to start with, and ranks that stand by; start_tables.py: how they look
profile.py `odyssey profile`
strategies_page.py docs/strategies.md and its pictures; strategy_examples.py: what they show of each strategy
"""
