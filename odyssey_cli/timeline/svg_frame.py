"""What our SVG pictures are made of: a card, texts, and a legend.

The card has its own colour, so that they read the same on a white and a dark page.
A picture needs no font, script or style of elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from odyssey.codec import for_people
from odyssey.text import as_unicode

WIDTH = 1000
_LETTER = 6.0
"""About the width of a letter of 11 px."""
_MOST = 2000
"""Characters of a text that was written elsewhere."""
_STYLE = """
text { font: 11px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.head { font-size: 12px; font-weight: 600 }
.dim { fill: #59636e }
""".strip()


def card(title: str, style: str, parts: Iterable[str], height: int, width: int = WIDTH) -> str:
    """The whole file. `style`: of what lies on it, besides `title`, `head` and `dim`."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{_STYLE}\n{style}\n</style>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, name: str = "") -> str:
    """`name`: its class."""
    attribute = f' class="{name}"' if name else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}">{escaped(words)}</text>'


def legend(entries: Iterable[tuple[Sequence[str], str]], y: float, thin: str) -> tuple[list[str], float]:
    """A line, or several: for each entry a swatch of each of its classes, and its words. `thin`: the class of swatches that are
    low. Answers its parts, and the baseline of its last line."""
    parts, x = [], 16.0
    for names, words in entries:
        length = 16 * len(names) + len(words) * _LETTER + 16
        if x + length > WIDTH - 16:
            x, y = 16.0, y + 18
        for i, name in enumerate(names):
            top, height = (y - 4, 3) if name == thin else (y - 9, 10)
            parts.append(f'<rect class="{name}" x="{x + 15 * i:.1f}" y="{top:.1f}" width="13" height="{height}"/>')
        parts.append(text(x + 15 * len(names) + 3, y, words))
        x += length
    return parts, y


def escaped(words: str) -> str:
    """Whatever was written elsewhere, as the text of an XML file."""
    return escape(for_people(as_unicode(words), _MOST))
