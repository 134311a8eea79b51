"""Which packages the wheel has, found: all else about it is in pyproject.toml.

Beside other people's code only `odyssey` and `odyssey_cli` are installed: the other names are common ones, and would hide a
user's folders. They go into a package of odyssey_cli's, where odyssey_cli/own_packages.py finds them.
"""

from setuptools import find_packages, setup

INSTALLED = ("odyssey", "odyssey_cli")
WITHIN = ("configs", "launcher", "perfmodel", "strategies")
INSIDE = "odyssey_cli._packages"


def found(names: tuple[str, ...]) -> list[str]:
    return find_packages(include=[pattern for name in names for pattern in (name, f"{name}.*")])


setup(
    packages=[*found(INSTALLED), *(f"{INSIDE}.{name}" for name in found(WITHIN))],
    package_dir={f"{INSIDE}.{name}": name for name in WITHIN},
)
