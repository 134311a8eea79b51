"""The throughput over a replay as SVG: a band for each policy, the most useful first, full height as without failures."""

from __future__ import annotations

from odyssey_cli.display import quantities
from odyssey_cli.replay.answer import share
from odyssey_cli.replay.ask import Answer
from odyssey_cli.replay.outcome import Outcome
from odyssey_cli.timeline.svg_frame import escaped

_WIDTH, _LABEL, _BAND, _GAP, _TOP, _RIGHT = 960, 130, 44, 14, 58, 66
_N_BINS = 380
_FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


def drawn(answer: Answer) -> str:
    """The whole file."""
    outcomes = sorted(answer.outcomes, key=lambda outcome: -outcome.useful)
    height = _TOP + len(outcomes) * (_BAND + _GAP) + 26
    trace = answer.trace
    facts = f"{quantities.plural(trace.n_losses, 'loss', 'losses')} in {quantities.seconds(trace.length_s)}"
    title = f"{answer.source}, {quantities.plural(trace.n_nodes, 'node')}: useful throughput, {trace.name} ({facts})"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' {_FONT} font-size='13'>",
        f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='16' y='28' font-size='15' fill='#111827'>{escaped(title)}</text>",
        "<text x='16' y='46' fill='#6b7280'>full height: all nodes without failures</text>",
    ]
    for i, outcome in enumerate(outcomes):
        parts += _band(outcome, _TOP + i * (_BAND + _GAP))
    y = height - 8
    parts.append(f"<text x='{_LABEL}' y='{y}' fill='#6b7280'>0</text>")
    end = quantities.seconds(trace.length_s)
    parts.append(f"<text x='{_WIDTH - _RIGHT}' y='{y}' fill='#6b7280' text-anchor='end'>{end}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _band(outcome: Outcome, top: float) -> list[str]:
    """A policy's name, its throughput as an area in a frame, and its share in all."""
    values = outcome.over_time(_N_BINS)
    width = (_WIDTH - _LABEL - _RIGHT) / len(values)
    bottom = top + _BAND
    path = [f"M{_LABEL},{bottom}"]
    for i, value in enumerate(values):
        y = bottom - min(value, 1.0) * _BAND
        path.append(f"L{_LABEL + i * width:.1f},{y:.1f}L{_LABEL + (i + 1) * width:.1f},{y:.1f}")
    path.append(f"L{_WIDTH - _RIGHT},{bottom}Z")
    middle = top + _BAND / 2 + 4
    return [
        f"<text x='16' y='{middle}' fill='#111827'>{escaped(outcome.policy)}</text>",
        f"<rect x='{_LABEL}' y='{top}' width='{_WIDTH - _LABEL - _RIGHT}' height='{_BAND}' fill='#f3f4f6'/>",
        f"<path d='{''.join(path)}' fill='#15803d'/>",
        f"<text x='{_WIDTH - _RIGHT + 8}' y='{middle}' fill='#111827'>{share(outcome.useful)}</text>",
    ]
