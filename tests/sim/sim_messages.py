"""The calls of a sim_programs.Script that are messages between two ranks, and their row of the
matrix.
"""

import numpy as np
from sim_rows import num_bytes

from kccl.base.abi import MAX_WORLD_SIZE, MOST_GPU_TAG, message_head

SEND_RECV = "send_recv"
# The least that the layout allows. The pipes are short, so a long message takes many steps.
MESSAGE_BYTES = 32768
# Bytes that one step always takes, so that a rank may send to itself and then receive.
_BUFFERED = 48


class Messages:
    """One of Script's base classes, with these calls."""

    def messages(self, actor, those, *, shifts=(0, 0), expected=None, tags=(0, 0), from_any=False):
        """A call of each rank that has a message in `those`, with all of its messages.

        Args:
            those: (sender, receiver, bytes) of each.
            expected: Bytes that receivers believe to get, if it is not what is sent.
            tags: The tag of the senders, and that of the receivers, -1 for any.
            from_any: Whether receivers do not say from which rank a message comes. Each of them
                then has one in `those`.
        """
        calls = {}
        everyone = (1 << self.world_size) - 1
        for sender, receiver, nbytes in those:
            values = self.random_bytes(max(nbytes, expected or 0))[sender]
            at = self.place(sender, values[:nbytes], is_written=False, shift=shifts[0])
            length = nbytes if expected is None else expected
            what = f"message of {nbytes} bytes from rank {sender}"
            out = self.place(receiver, values[:length], is_written=True, shift=shifts[1], what=what)
            sent, taken = message_head(nbytes, tags[0]), message_head(length, tags[1])
            _add(calls, sender, "sends", "send_from", receiver, sent, self.address(sender, at))
            _add(
                *(calls, receiver, "receives", "receive_to", 0 if from_any else sender, taken),
                self.address(receiver, out),
            )
            if from_any:
                source = np.array([tags[0] << 8 | sender + 1], np.uint32)
                told = self.place(receiver, source, is_written=True, what="the message's source")
                calls[receiver] |= {"peer": everyone, "output": self.address(receiver, told)}
        for rank, fields in calls.items():
            self.call(actor, rank, SEND_RECV, **fields)

    def message(self, actor, sender, receiver, nbytes, **options):
        """One message, in a call of each of the two ranks."""
        if sender != receiver:
            self.messages(actor, [(sender, receiver, nbytes)], **options)
            return
        values = self.random_bytes(nbytes)[sender]
        at = self.place(sender, values, is_written=False)
        out = self.place(sender, values, is_written=True, what="a rank's message to itself")
        for place, fields in ((at, ("sends", "send_from")), (out, ("receives", "receive_to"))):
            calls = {}
            _add(calls, sender, *fields, sender, nbytes, self.address(sender, place))
            self.call(actor, sender, SEND_RECV, **calls[sender])


def _add(calls, rank, heads, addresses, peer, head, address):
    fields = calls.setdefault(rank, {"messages": 0})
    bit = peer + (MAX_WORLD_SIZE if heads == "receives" else 0)
    assert not fields["messages"] >> bit & 1
    fields["messages"] |= 1 << bit
    for name, value in ((heads, head), (addresses, address)):
        fields.setdefault(name, [0] * MAX_WORLD_SIZE)[peer] = value


def _row(script, actors, size, rng):
    """Messages of random pairs. Each rank takes part in them in one order, so nobody waits in
    vain; the others go on.
    """
    ranks = script.world_size
    most = num_bytes(size)
    for _ in range(1 if most > 4096 else 2):
        lengths = rng.choice([0, most // 3, most - most // 5, most], ranks)
        pairs = rng.integers(0, ranks, (ranks, 2))
        shifts = tuple(rng.choice([0, 0, 3], 2).tolist())
        tag = int(rng.choice([0, 7, MOST_GPU_TAG]))
        tags = tag, int(rng.choice([tag, -1]))
        from_any = bool(rng.integers(2))
        for actor in actors:
            for number, ((sender, receiver), nbytes) in enumerate(
                zip(pairs.tolist(), lengths.tolist(), strict=True)
            ):
                if sender != receiver:
                    # Which rank's message comes first is not known, so the tags tell them apart.
                    tags = (number + 1, number + 1) if from_any else tags
                    options = {"shifts": shifts, "tags": tags, "from_any": from_any}
                    script.message(actor, sender, receiver, nbytes, **options)
                else:
                    script.message(actor, sender, sender, min(nbytes, _BUFFERED))


ROWS = {SEND_RECV: _row}
