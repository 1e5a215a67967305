"""Writes timelines to a file for https://ui.perfetto.dev, in Chrome's JSON of trace events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kccl.engine.model.timeline import ASKED, LANDED, LET_GO, Timeline, level

from .timeline import WINDOW_NS

MOST_BYTES = 16_000_000
"""The most bytes of a file. It has as many whole tokens as fit, and at least one."""
# Nanoseconds between two samples of how many stages of weights a block's ring holds.
_SAMPLE_NS = 2000.0

Event = dict[str, Any]


def write(path: Path, timelines: Sequence[Timeline], facts: dict[str, Any]) -> int:
    """Writes a process for each rank, with a track for each block. A track shows ops, and in each
    op the block's phases.

    Each rank has counters of weights that land, and of stages that are full and in flight, averaged
    over the blocks. Each block has counters of its own full and in-flight stages.

    Args:
        path: The file.
        timelines: The timelines of all ranks.
        facts: Further facts to write into the file.

    Returns:
        The number of tokens in the file.
    """
    lines = [_line(event) for timeline in timelines for event in _names(timeline)]
    size, num = sum(map(len, lines)), 0
    for index in range(timelines[0].num_token_steps):
        more = [_line(event) for each in timelines for event in _events(each, index)]
        size += sum(map(len, more))
        if num > 0 and size > MOST_BYTES:
            break
        lines += more
        num += 1
    head = json.dumps({"displayTimeUnit": "ns", "otherData": facts | {"tokens": num}})
    body = ",\n".join(lines)
    path.write_text(f'{head[:-1]}, "traceEvents": [\n{body}\n]}}\n')
    return num


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


def _names(timeline: Timeline) -> Iterator[Event]:
    pid = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
    for block in range(timeline.layout.num_blocks):
        name = {"name": f"block {block}, residual {block % timeline.layout.num_lane_groups}"}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": block, "args": name}


def _events(timeline: Timeline, index: int) -> Iterator[Event]:
    """Yields the events of one kept token step."""
    yield from _slices(timeline, index)
    yield from _counters(timeline, float(timeline.begins[index]), float(timeline.begins[index + 1]))


def _slices(timeline: Timeline, index: int) -> Iterator[Event]:
    pid = timeline.rank
    us = timeline.ops[index] * 1e-3
    for block in range(timeline.layout.num_blocks):
        place = {"ph": "X", "pid": pid, "tid": block}
        for op, stamps in zip(timeline.layout.ops, us[:, :, block], strict=True):
            begin, end = stamps[op.phases[0].begin], stamps[op.phases[-1].end]
            if np.isnan(begin):
                continue
            name = op.kind if op.layer < 0 else f"{op.layer} {op.kind}"
            yield place | {"name": name} | _span(begin, end)
            for phase in op.phases:
                span = _span(stamps[phase.begin], stamps[phase.end])
                yield place | {"name": phase.name} | span


def _counters(timeline: Timeline, begin: float, end: float) -> Iterator[Event]:
    pid, num_blocks = timeline.rank, timeline.layout.num_blocks
    times, nbytes, blocks = timeline.flat_stages()
    windows = np.arange(begin, end, WINDOW_NS)
    landed = np.histogram(times[LANDED], [*windows, windows[-1] + WINDOW_NS], weights=nbytes)[0]
    full = level(times[LANDED], times[LET_GO], windows) / num_blocks
    flying = level(times[ASKED], times[LANDED], windows) / num_blocks
    for at, rate, has, asked in zip(windows, landed / WINDOW_NS, full, flying, strict=True):
        place = {"ph": "C", "pid": pid, "ts": _rounded(at * 1e-3)}
        yield place | {"name": "weights that land", "args": {"GB/s": _rounded(rate)}}
        yield place | {
            "name": "stages, mean",
            "args": {"full": _rounded(has), "in flight": _rounded(asked)},
        }
    samples = np.arange(begin, end, _SAMPLE_NS)
    for block in range(num_blocks):
        mine = times[:, blocks == block]
        full = level(mine[LANDED], mine[LET_GO], samples)
        flying = level(mine[ASKED], mine[LANDED], samples)
        # Only changes are written, because a counter keeps its value.
        is_new = np.diff(full, prepend=-1) != 0
        is_new |= np.diff(flying, prepend=-1) != 0
        for at in np.flatnonzero(is_new):
            ts, name = _rounded(samples[at] * 1e-3), f"ring {block}"
            values = {"full": int(full[at]), "in flight": int(flying[at])}
            yield {"ph": "C", "pid": pid, "ts": ts, "name": name, "args": values}


def _span(begin: float, end: float) -> Event:
    """Returns the time fields of an event. Rounds its times and not its duration, so that a phase
    still ends within its op.
    """
    ts = _rounded(begin)
    return {"ts": ts, "dur": _rounded(_rounded(end) - ts)}


def _rounded(value: float) -> float:
    return round(float(value), 3)
