"""From a command line to what the launcher is asked to do.

options.py    all options of a launch, in one table
torch_version.py  which torch is installed: its torchrun's options are those that can be given
help.py       what `-h` and `--help` print
parser.py     reads a command line by it
completion.py what shells complete it by
values.py     what the words of one value mean
request.py    the options that the agent obeys
rendezvous.py where the agents are to meet
from_slurm.py what SLURM says where the command line says nothing
devices.py    how many ranks a host has room for
typed_requests.py  what typer's larger commands are asked
checks.py     what can be known to be wrong before anything is started
"""
