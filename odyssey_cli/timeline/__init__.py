"""Pictures of a training step, what every worker does at every moment; and of what a change does to the layout.

picture.py  rows of bars, from a plan and the times of its ops
recorded.py the steps that a job has recorded, beside what was predicted
legend.py   what the kinds of bars are called, and the marks of the time axis
terminal.py the picture as text
svg.py      the picture as SVG
trace.py    the picture as a trace for Perfetto
change.py   the layouts before and after a change, and what has changed in words; change_svg.py: as SVG
svg_frame.py     what SVG pictures are made of
save.py     pictures and traces in files
"""
