"""What people see of a job.

board.py         the state of the display, a fold over the event log
screen.py        the live area; terminal.py: where it is written to
output_lines.py  the ranks' lines above it; repeated.py: those that are alike
render.py        the whole picture; layout_grid.py, progress.py, candidates.py: parts of it
layout_words.py  a layout in words
plain_log.py     lines, where there is no terminal; own_lines.py: they are written beside the job, as is what is said at its end
failure_block.py why a job failed
summary.py       what a job came to; fidelity.py: whether its gradients were exact
rank_state.py, quantities.py: colours and numbers, the same everywhere
page.py          where answers of commands are printed; fitted_table.py: tables that lose columns before they lose digits
"""
