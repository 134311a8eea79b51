"""Which packages the wheel has, found, and its kernel, compiled: all else about it is in pyproject.toml.

Beside other people's code only `odyssey` and `odyssey_cli` are installed: the other names are common ones, and would hide a
user's folders. They go into a package of odyssey_cli's, where odyssey_cli/own_packages.py finds them.

`odyssey/kernel/plain.py` is compiled where there are mypyc and a C compiler; where there are not, it runs as it is.
"""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, find_packages, setup

INSTALLED = ("odyssey", "odyssey_cli")
WITHIN = ("configs", "launcher", "perfmodel", "strategies")
INSIDE = "odyssey_cli._packages"
KERNEL = Path("odyssey/kernel/plain.py")


def found(names: tuple[str, ...]) -> list[str]:
    return find_packages(include=[pattern for name in names for pattern in (name, f"{name}.*")])


def kernel() -> list[Extension]:
    """Under the name by which odyssey/kernel/__init__.py looks for it, which only this source has."""
    name, here = f"_compiled_{hashlib.sha256(KERNEL.read_bytes()).hexdigest()[:16]}", Path.cwd()
    folder = here / "build/kernel"
    try:
        from mypyc.build import mypycify

        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_bytes(KERNEL.read_bytes())
        os.chdir(folder)  # a module by itself, and no part of a package that imports others
        (extension,) = mypycify([f"{name}.py"], target_dir=str(folder))
    except (Exception, SystemExit) as error:
        print(f"odyssey/kernel is not compiled: {error!r}")
        return []
    finally:
        os.chdir(here)
    extension.name = f"odyssey.kernel.{name}"
    extension.optional = True  # a compiler that fails costs speed and nothing else
    extension.extra_compile_args.append("-ffp-contract=off")  # it rounds as Python does
    return [extension]


setup(
    packages=[*found(INSTALLED), *(f"{INSIDE}.{name}" for name in found(WITHIN))],
    package_dir={f"{INSIDE}.{name}": name for name in WITHIN},
    ext_modules=kernel(),
)
