"""The picture of a step as a trace in the format of Chrome, which ui.perfetto.dev opens: a process a panel, a thread a worker.

Reductions run beside a worker's computations, so they are asynchronous events; all others are complete ones. Times are
microseconds since the start of the step.
(Trace Event Format, Google 2016.)
"""

from __future__ import annotations

from typing import Any

from odyssey.codec import to_json
from odyssey_cli.timeline.picture import Bar, OpKind, Panel, Picture, WorkerRow


def encode(picture: Picture) -> bytes:
    """The whole trace, JSON."""
    events = [event for number, panel in enumerate(picture.panels, 1) for event in _of_panel(number, panel)]
    return to_json({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": picture.title}}) + b"\n"


def _of_panel(pid: int, panel: Panel) -> list[dict[str, Any]]:
    events = [
        _metadata("process_name", pid, 0, {"name": panel.title}),
        _metadata("process_sort_index", pid, 0, {"sort_index": pid}),
    ]
    for number, row in enumerate(panel.rows):
        events.append(_metadata("thread_name", pid, row.rank, {"name": _name(row)}))
        events.append(_metadata("thread_sort_index", pid, row.rank, {"sort_index": number}))
        for bar in row.bars:
            events += _of_bar(pid, row, bar)
    return events


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _name(row: WorkerRow) -> str:
    if not row.place:
        return f"rank {row.rank}: {row.lost}"
    pipeline, _, stage = row.place.partition(".")
    name = f"rank {row.rank}, pipeline {pipeline} stage {stage}"
    return f"{name}: {row.lost}" if row.lost else name


def _of_bar(pid: int, row: WorkerRow, bar: Bar) -> list[dict[str, Any]]:
    args: dict[str, Any] = {"op": bar.op}
    if bar.micro_batch is not None:
        args |= {"micro_batch": bar.micro_batch, "rerouted": bar.is_rerouted}
    name = f"{bar.kind} {bar.micro_batch}" if bar.micro_batch is not None else bar.kind.value
    event = {"name": name, "cat": bar.kind.value, "pid": pid, "tid": row.rank, "ts": bar.start_s * 1e6, "args": args}
    if bar.kind is not OpKind.REDUCTION:
        return [{**event, "ph": "X", "dur": (bar.end_s - bar.start_s) * 1e6}]
    event["id2"] = {"local": f"{row.rank} {bar.op}"}
    return [{**event, "ph": "b"}, {**event, "ph": "e", "ts": bar.end_s * 1e6, "args": {}}]
