"""Writes the last steps of a simulated machine as a trace for ui.perfetto.dev or Chrome."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.errors import InvalidArgument
from .report import Reporter


def write(path: Path, trace_events: Sequence[Any]) -> None:
    """Writes a file in Chrome's trace-event JSON format.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    document = {"traceEvents": trace_events, "displayTimeUnit": "ns"}
    try:
        path.write_text(json.dumps(document))
    except OSError as error:
        raise InvalidArgument(f"trace is {path}, which cannot be written: {error}") from error


def trace_of(events: Sequence[Any], reporter: Reporter, warp_size: int) -> list[dict[str, Any]]:
    """Returns trace events: a process for each rank, and in it a track for each of its threads.

    One step of the machine is shown as one microsecond.

    Args:
        events: KcclSimEvents, oldest first.
        reporter: Gives the text of each event.
        warp_size: Threads of a warp.
    """
    reporter.symbols.look_up(event.place.site for event in events)
    tracks: dict[tuple[int, int, int], int] = {}
    slices = []
    for event in events:
        place = event.place
        track = tracks.setdefault((place.rank, place.block, place.thread), len(tracks))
        words = reporter.event(event)
        slices.append(
            {
                "ph": "X",
                "pid": place.rank,
                "tid": track,
                "ts": event.step,
                "dur": 1,
                "name": f"{words} at {reporter.symbols.line(place.site)}",
                "cat": words.split(" ")[0],
                "args": {
                    "address": f"{event.address:#x}",
                    "value": f"{event.value:#x}",
                    "stores_old": event.age,
                    "channel": place.channel,
                    "epoch": place.epoch,
                    "stack": [str(frame) for frame in reporter.symbols.frames(place.site)],
                },
            }
        )
    names = [
        _named("process", f"rank {rank}", pid=rank) for rank in {rank for rank, _, _ in tracks}
    ]
    for order, ((rank, block, thread), track) in enumerate(sorted(tracks.items())):
        words = f"block {block} warp {thread // warp_size} thread {thread}"
        names.append(_named("thread", "host" if block < 0 else words, pid=rank, tid=track))
        sort = {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track}
        names.append(sort | {"args": {"sort_index": order}})
    return [*names, *slices]


def _named(what: str, name: str, **about: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", **about, "args": {"name": name}}
