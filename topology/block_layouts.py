"""The layouts of exchanges between the blocks of a GPU's kernel, which place_blocks() chooses from.

`at` is the part of the GPU that each block runs on, and `near` the memory that is near it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .layout import LINE_BYTES, Flag, Layout

COUNTER_LINES = 2
"""Lines from one counter of grid_sync to the next one (grid.cuh)."""


def counters(gpu: str, at: tuple[str, ...], count: int) -> Layout:
    """Returns the layout of grid_sync (grid.cuh): blocks add to `count` counters in turn, and each
    block polls them all.
    """
    everybody = tuple(range(len(at)))
    return Layout(
        name="counters",
        seats=at,
        homes=(gpu,) * len(at),
        flags=tuple(
            Flag(
                writer=b,
                at=gpu,
                offset=b % count * COUNTER_LINES * LINE_BYTES,
                pollers=everybody,
                is_counter=True,
            )
            for b in everybody
        ),
    )


def flat(gpu: str, at: tuple[str, ...], nbytes: int) -> Layout:
    """Returns the layout in which every block polls the line of every block."""
    everybody, stride = tuple(range(len(at))), whole_lines(nbytes)
    return Layout(
        name="flat",
        seats=at,
        homes=(gpu,) * len(at),
        flags=tuple(
            Flag(writer=b, at=gpu, offset=b * stride, nbytes=nbytes, pollers=everybody)
            for b in everybody
        ),
    )


def copies(at: tuple[str, ...], near: tuple[str, ...], nbytes: int) -> Layout:
    """Returns the layout in which each block writes its line into the memory of each die, and
    blocks poll only the memory near them.
    """
    stride, memories = whole_lines(nbytes), tuple(dict.fromkeys(near))
    pollers = {home: tuple(b for b, own in enumerate(near) if own == home) for home in memories}
    return Layout(
        name="copies",
        seats=at,
        homes=near,
        flags=tuple(
            Flag(writer=b, at=home, offset=b * stride, nbytes=nbytes, pollers=pollers[home])
            for b in range(len(at))
            # Writes to far memories come first, because they take longest.
            for home in sorted(memories, key=lambda home: home == near[b])
        ),
        is_near=True,
    )


def leaders(at: tuple[str, ...], near: tuple[str, ...]) -> Layout:
    """Returns the layout in which blocks write a flag for their die's leader, and each leader then
    writes a line near each die, which the die's blocks poll.
    """
    members = {seat: [b for b, own in enumerate(at) if own == seat] for seat in dict.fromkeys(at)}
    leader = {seat: own[0] for seat, own in members.items()}
    flags: list[Flag] = []
    seen: dict[str, tuple[int, ...]] = {}
    lines = dict.fromkeys(near, 0)

    def flag(writer: int, home: str, pollers: Sequence[int], after: tuple[int, ...]) -> None:
        offset = lines[home] * LINE_BYTES
        lines[home] += 1
        flags.append(
            Flag(writer=writer, at=home, offset=offset, pollers=tuple(pollers), after=after)
        )

    for seat, own in members.items():
        begin = len(flags)
        for block in own[1:]:
            flag(block, near[leader[seat]], (leader[seat],), ())
        seen[seat] = tuple(range(begin, len(flags)))
    for seat, block in leader.items():
        others = [other for other in dict.fromkeys(near) if other != near[block]]
        for home in (*others, near[block]):
            pollers = [b for b in range(len(at)) if near[b] == home]
            flag(block, home, pollers, seen[seat])
    return Layout(
        name="leaders",
        seats=at,
        homes=near,
        leaders=tuple(leader.items()),
        flags=tuple(flags),
        is_near=True,
    )


def whole_lines(nbytes: int) -> int:
    """Returns bytes rounded up to whole lines."""
    return -(-nbytes // LINE_BYTES) * LINE_BYTES
