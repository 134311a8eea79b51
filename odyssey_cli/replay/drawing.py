"""The throughput over a replay as SVG: a band for each policy, the most useful first, full height as without failures."""

from __future__ import annotations

from odyssey_cli.display import quantities
from odyssey_cli.replay.answer import share
from odyssey_cli.replay.ask import Answer
from odyssey_cli.replay.outcome import Outcome
from odyssey_cli.timeline.svg_frame import WIDTH, card, text

_LEFT, _RIGHT = 130, 66
"""Beside the bands: names, shares."""
_TOP, _BAND, _GAP = 58, 44, 14
_N_BINS = 380
_STYLE = ".right { text-anchor: end; fill: #59636e } .all { fill: #eef0f3 } .useful { fill: #15803d }"


def drawn(answer: Answer) -> str:
    """The whole file."""
    outcomes = sorted(answer.outcomes, key=lambda outcome: -outcome.useful)
    trace = answer.trace
    facts = f"{quantities.plural(trace.n_losses, 'loss', 'losses')} in {quantities.seconds(trace.length_s)}"
    title = f"{answer.source}, {quantities.plural(trace.n_nodes, 'node')}: useful throughput, {trace.name} ({facts})"
    parts = [text(16, 26, title, "title"), text(16, 46, "full height: all nodes without failures", "dim")]
    for i, outcome in enumerate(outcomes):
        parts += _band(outcome, _TOP + i * (_BAND + _GAP))
    height = _TOP + len(outcomes) * (_BAND + _GAP) + 26
    parts += [
        text(_LEFT, height - 14, "0", "dim"),
        text(WIDTH - _RIGHT, height - 14, quantities.seconds(trace.length_s), "right"),
    ]
    return card(title, _STYLE, parts, height)


def _band(outcome: Outcome, top: float) -> list[str]:
    """A policy's name, its throughput as an area in a frame, and its share in all."""
    values = outcome.over_time(_N_BINS)
    room, bottom, middle = WIDTH - _LEFT - _RIGHT, top + _BAND, top + _BAND / 2 + 4
    width = room / len(values)
    path = [f"M{_LEFT},{bottom}"]
    for i, value in enumerate(values):
        y = bottom - min(value, 1.0) * _BAND
        path.append(f"L{_LEFT + i * width:.1f},{y:.1f}L{_LEFT + (i + 1) * width:.1f},{y:.1f}")
    path.append(f"L{WIDTH - _RIGHT},{bottom}Z")
    return [
        text(16, middle, outcome.policy),
        f'<rect class="all" x="{_LEFT}" y="{top}" width="{room}" height="{_BAND}"/>',
        f'<path class="useful" d="{"".join(path)}"/>',
        text(WIDTH - _RIGHT + 8, middle, share(outcome.useful)),
    ]
