"""Every relative link of every page leads to a file that is there, and every anchor to a heading. So do paths in code, and the
words of the glossary are the code's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import strategies
from tests import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists the repository's files")


def files(*patterns: str) -> list[Path]:
    """Those of the repository that match, new ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return sorted(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


PAGES = files("*.md")
NO_PROSE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
"""Code: in fences, by its indentation, within a line. A list's further lines are indented by less."""
PATH_IN_CODE = re.compile(r"(?<![\w./-])docs/[\w/-]+\.(?:md|svg)")


def links(page: Path) -> list[str]:
    """Where its links and pictures lead within the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", NO_PROSE.sub("", page.read_text()))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of its headings: each word in lower case, with dashes between, and a number from the second of a
    name on."""
    made: set[str] = set()
    n_of: dict[str, int] = {}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        n = n_of[name] = n_of.get(name, -1) + 1
        made.add(f"{name}-{n}" if n else name)
    return made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.is_relative_to(ROOT) or not there.exists():
            broken.append(f"{target}: no such file")
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            broken.append(f"{target}: no such heading")

    assert broken == []


def test_every_page_that_code_names_is_there() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files("*.py", "*.yaml", "*.toml", "Makefile")
        for name in PATH_IN_CODE.findall(path.read_text())
    }

    assert len(named) > 10
    assert {(path, name) for path, name in named if not (ROOT / name).is_file()} == set()


def test_every_page_can_be_found_from_another() -> None:
    """By a link of a page, or of the README."""
    linked = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in links(page)}

    assert [page for page in files("docs/*.md") if page not in linked] == []


# -- the glossary ------------------------------------------------------------------------------------------------------

GLOSSARY = ROOT / "docs" / "internals" / "glossary.md"
WORDS = re.findall(r"^\| ([a-z][a-z -]*) \| [A-Z].*\. \| (\[.*\)) \|$", GLOSSARY.read_text(), re.MULTILINE)


def uses(source: str, word: str) -> bool:
    """Whether it does, in its text or in a name (`n_spares`, `RankLost`); in the plural too."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", source)
    wanted = r"[-\s]".join(re.split("[ -]", word))
    return re.search(rf"\b{wanted}s?\b", text, re.IGNORECASE) is not None


def test_the_glossary_has_each_word_once() -> None:
    rows = re.findall(r"^\| (?!word)", GLOSSARY.read_text(), re.MULTILINE)
    words = [word for word, _ in WORDS]

    assert len(rows) == len(words) == len({*words}) >= 30


@pytest.mark.parametrize(("word", "where"), WORDS, ids=[word for word, _ in WORDS])
def test_a_word_of_the_glossary_is_used_where_it_says_and_by_ranks_or_agents(word: str, where: str) -> None:
    """None of these knows a strategy by its name."""
    told = [(GLOSSARY.parent / target).resolve() for target in re.findall(r"\((.+?)\)", where)]
    ours = [path for package in ("odyssey", "launcher") for path in (ROOT / package).rglob("*.py")]

    assert [path for path in told if not uses(path.read_text(), word)] == []
    assert any(uses(path.read_text(), word) for path in ours) != (word in strategies.names())


INVARIANTS = ROOT / "docs/internals/invariants.md"
CITED = re.compile(r"\bI\d+\b")


def test_every_invariant_is_cited_where_the_page_says_and_no_other_is() -> None:
    rows = [line for line in INVARIANTS.read_text().splitlines() if line.startswith("| I")]
    listed = set()
    for row in rows:
        _, number, _, *cells, _ = (cell.strip() for cell in row.split("|"))
        listed.add(number)
        for path in re.findall(r"\]\(([^)]+)\)", " ".join(cells)):
            assert number in CITED.findall((INVARIANTS.parent / path).read_text()), f"{path} does not cite {number}"
    packages = [f"{name}/*.py" for name in ("odyssey", "launcher", "strategies", "perfmodel", "odyssey_cli")]
    cited = {number for path in files(*packages) for number in re.findall(r"\((I\d+)\b", path.read_text())}

    assert cited == listed
