"""Whether a script means Odyssey is seen from what it imports, not from words in its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.options import Entry, RunOptions
from launcher.processes.rank_process import imports_for, imports_odyssey
from odyssey_cli.command_line.options import Command
from odyssey_cli.command_line.request import read


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    "text",
    [
        "import odyssey",
        "import os, odyssey.job as job",
        "from odyssey import Job",
        "from odyssey.job import Job",
        "def main():\n    import odyssey",
        "try:\n    import odyssey\nexcept ImportError:\n    odyssey = None",
        "pattern = '\\d'\nimport odyssey",
    ],
)
def test_an_import_counts_wherever_it_stands(script: Path, text: str, recwarn: pytest.WarningsRecorder) -> None:
    script.write_text(text)
    options = RunOptions(str(script))

    assert imports_odyssey(options) and "odyssey.job" in imports_for(options)
    assert read([str(script)], {}, Command.RUN).wants_display
    assert not recwarn.list, "what the compiler complains of is said once, by the ranks"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# runs under odyssey as well",
        "print('odyssey')",
        "import odyssey_tools",
        "from .odyssey import Job",
        "from mine import odyssey",
        "open('/data/odyssey/train')",
    ],
)
def test_a_word_in_the_text_does_not(script: Path, text: str) -> None:
    script.write_text(text)
    options = RunOptions(str(script))

    assert not imports_odyssey(options) and "odyssey.job" not in imports_for(options)
    assert not read([str(script)], {}, Command.RUN).wants_display


@pytest.mark.parametrize("text", ["import odyssey\ndef", "import odyssey\0"])
def test_what_does_not_compile_imports_nothing(script: Path, text: str) -> None:
    """Where it is a plain file it is refused; another Python may run it."""
    script.write_text(text)
    assert not imports_odyssey(RunOptions(str(script))) and "odyssey.job" not in imports_for(RunOptions(str(script)))


def test_modules_and_packages_are_read_and_programs_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import odyssey")
    monkeypatch.chdir(tmp_path)

    assert imports_odyssey(RunOptions("package"))
    assert imports_odyssey(RunOptions("package", entry=Entry.MODULE))
    assert not imports_odyssey(RunOptions("package/__main__.py", entry=Entry.PROGRAM))
