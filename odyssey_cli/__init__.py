"""The command line: `odyssey run`, `odyssey check`, `odyssey plan`, the display of a running job, and its errors.

The top of the import order: it may import `launcher`, `strategies`, `perfmodel` and `odyssey`; nothing imports it.
Commands load what they need when they are called, so `odyssey --help` is quick and a run reaches its first rank
without torch or numpy.
"""

from odyssey_cli.own_packages import find_first

find_first()
