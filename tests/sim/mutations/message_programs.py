"""Programs that show planted bugs of messages."""

from sim_machine import LL16
from sim_messages import MESSAGE_BYTES, SEND_RECV

from kccl.base import abi

from .program import NARROW, Program

FROM_ANY = "messages from any rank"
# A pipe has room for packets with 240 bytes of a message, and for chunks of some 3 KiB.
_PIPES = {**NARROW, "message_bytes": MESSAGE_BYTES, "num_channels": 4}
_LENGTHS = (0, 5, 300, 240, 12000, 9, 7000)


def _ring(script):
    """Around and back; rank 0 sends first, so nobody waits in vain. A call of all in between."""
    script.begin(threads=2 * script.machine.warp_size)
    ranks = script.world_size
    for nbytes in _LENGTHS * 2:
        for step in (1, -1):
            for sender in range(0, step * ranks, step):
                script.message(0, sender % ranks, (sender + step) % ranks, nbytes)
        script.all_reduce(0, LL16, 2)


def _bursts(script):
    """A long message, and then for most of a period of epochs only short ones."""
    script.begin(threads=script.machine.warp_size)
    for _ in range(3):
        script.message(0, 0, 1, 7000)
        for number in range(9):
            script.message(0, 0, 1, number)


def _grouped(script):
    """Each rank exchanges messages with both neighbours in one call, which has several blocks."""
    script.begin(threads=script.machine.warp_size, blocks=8, style="calls")
    ranks = script.world_size
    for nbytes, tags in ((6000, (0, 0)), (3, (9, 9)), (20000, (9, -1))):
        pairs = [(rank, (rank + step) % ranks) for rank in script.ranks for step in (1, -1)]
        script.messages(0, [(*pair, nbytes) for pair in pairs], tags=tags)


def _in_dependents(script):
    """Each call may begin before the one before has ended."""
    script.begin(threads=script.machine.warp_size, blocks=2, style="calls", dependents="early")
    for nbytes in (300, 5, 7000, 9):
        script.messages(0, [(0, 1, nbytes), (1, 0, nbytes)])
        script.message(0, 1, 2, nbytes)


def _in_chains(script):
    """Two chains of calls compete for room."""
    script.begin(threads=script.machine.warp_size, style="calls", streams=2, dependents="early")
    for number in range(16):
        for actor in range(2):
            script.messages(actor, [(0, 1, number), (1, 0, number)])


def _from_any(script):
    """Ranks 1 and 2 send to rank 0, which asks for one of them by its tag. Blocks share a
    message.
    """
    script.begin(threads=2 * script.machine.warp_size, blocks=4, style="calls")
    for nbytes in (6000, 3, 9000, 240) * 2:
        for tag in (2, 1):
            script.message(0, tag, 0, nbytes, tags=(tag, tag), from_any=True)


def _differing(script):
    script.begin(threads=2 * script.machine.warp_size)
    script.messages(0, [(0, 1, 40)], expected=48)


def _differing_tags(script):
    script.begin(threads=2 * script.machine.warp_size)
    script.messages(0, [(0, 1, 40)], tags=(3, 4))


_REFUSED = {
    "right": "failed_call",
    "statuses": (abi.lib.kKcclCallsDiffer, abi.lib.kKcclAborted),
}


PROGRAMS = {
    SEND_RECV: Program(_ring, 3, (SEND_RECV, LL16), _PIPES),
    "bursts of messages": Program(_bursts, 2, (SEND_RECV,), _PIPES),
    "grouped messages": Program(
        _grouped, 3, (SEND_RECV,), {**_PIPES, "num_channels": 1, "blocks_per_channel": 4}
    ),
    "messages of dependents": Program(_in_dependents, 3, (SEND_RECV,), _PIPES),
    FROM_ANY: Program(
        _from_any, 3, (SEND_RECV,), {**_PIPES, "num_channels": 1, "blocks_per_channel": 4}
    ),
    # Each launch has a block: so four calls have room, two of each chain.
    "chains of messages": Program(
        _in_chains, 2, (SEND_RECV,), {**_PIPES, "num_channels": 2, "most_blocks": 4}
    ),
    "a message of another length": Program(_differing, 2, (SEND_RECV,), _PIPES, **_REFUSED),
    "a message with another tag": Program(_differing_tags, 2, (SEND_RECV,), _PIPES, **_REFUSED),
}
