"""The calls of a sim_programs.Script whose arrays have a chunk for each rank, or for each block."""

from dataclasses import dataclass

import numpy as np
import oracle


@dataclass(frozen=True)
class Array:
    """An array of every rank: where it lies in the rank's memory, and what it holds in the end."""

    offsets: tuple
    values: tuple


UNTOUCHED = 0xB5  # what memory holds that a call has not written


def _collected(actor, num_actors, slices, share, length):
    """What a block collects in all rounds, of slices[time]; `share` is as in sequence.cuh.

    Each round begins where the one before would end if its slices had `length` elements.
    """
    each = []
    for time, every in enumerate(slices):
        before = len(each)
        if share and num_actors == 1:
            each.append(every[0])
        elif share and len(every) == num_actors:
            further = 1 + (share - 1) % (num_actors - 1)
            each.append(every[(actor + further) % num_actors])
        elif share:
            is_last = actor == num_actors - 1
            first = actor == 0 or (not is_last and (share + time) % 2 == 1)
            each += every[first : first + len(every) - 1]
        else:
            each += every
        missing = sum(length - len(one) for one in each[before:])
        if missing:
            each.append(np.full(missing, UNTOUCHED, np.uint8))
    return np.concatenate(each)


class Chunks:
    """Script's base class, with these calls."""

    def scatter(self, actor, kernel, count, *, in_place=False, shifts=(0, 0)):
        """A reduce_scatter of chunks of `count` elements. In place the other chunks must stay."""
        inputs = self.inputs(count * self.world_size)
        what = f"result of {kernel}, {count} {self.dtype}"
        results = []
        for rank, x in enumerate(inputs):
            want = oracle.reduce_scatter(inputs, self.op, rank)
            if in_place:
                held = x.copy()
                held[rank * count :][:count] = want
                source = self._place_over(rank, held, x, shift=shifts[0], what=what)
                result = source + rank * want.nbytes
            else:
                source = self._place(rank, x, is_written=False, shift=shifts[0])
                result = self._place(rank, want, is_written=True, shift=shifts[1], what=what)
            self._call_on(actor, rank, kernel, source, result, count)
            results.append((result, want))
        return Array(*zip(*results, strict=True))

    def gather(self, actor, kernel, nbytes, *, in_place=False, shifts=(0, 0)):
        """An all_gather of chunks of `nbytes`."""
        inputs = self._bytes(nbytes)
        want = oracle.all_gather(inputs)
        what = f"result of {kernel}, {nbytes} bytes a rank"
        results = []
        for rank, x in enumerate(inputs):
            if in_place:
                held = np.full(want.size, 0x3C, np.uint8)
                held[rank * nbytes :][:nbytes] = x
                result = self._place_over(rank, want, held, shift=shifts[1], what=what)
                source = result + rank * nbytes
            else:
                source = self._place(rank, x, is_written=False, shift=shifts[0])
                result = self._place(rank, want, is_written=True, shift=shifts[1], what=what)
            self._call_on(actor, rank, kernel, source, result, nbytes)
            results.append((result, want))
        return Array(*zip(*results, strict=True))

    def _place_over(self, rank, want, before, **options):
        """Room for an array that holds `before` until it is written."""
        at = self._place(rank, want, is_written=True, **options)
        self._initial[rank][at : at + before.nbytes] = before.view(np.uint8)
        return at

    def _call_on(self, actor, rank, kernel, source, result, count):
        where = {"input": self._address(rank, source), "output": self._address(rank, result)}
        self.call(actor, rank, kernel, count=count, **where)

    def exchange(
        self,
        nbytes,
        times=1,
        *,
        reaches_all=True,
        orders=True,
        shifts=(0, 0),
        share=0,
        other=0,
    ):
        """All blocks publish slices of `nbytes`, `times` times, at the same index of their lists.

        Each block collects all slices; or some, if `share` is not 0: see sequence.cuh. If `other`
        is not 0, every other exchange has only so many bytes.
        """
        num_actors = len(self._calls[0])
        sent = [self._bytes(nbytes * times) for _ in range(num_actors)]
        kernel = "grid_exchange"
        for rank in self.ranks:
            slices = [
                [
                    sent[actor][source][time * nbytes :][: other if other and time % 2 else nbytes]
                    for source in (self.ranks if reaches_all else [rank])
                    for actor in range(num_actors)
                ]
                for time in range(times)
            ]
            for actor in range(num_actors):
                want = _collected(actor, num_actors, slices, share, nbytes)
                mine = sent[actor][rank]
                at = self._place(rank, mine, is_written=False, shift=shifts[0])
                what = f"slices of {nbytes} bytes"
                out = self._place(rank, want, is_written=True, shift=shifts[1], what=what)
                self.call(
                    *(actor, rank, kernel),
                    input=self._address(rank, at),
                    output=self._address(rank, out),
                    count=nbytes,
                    peer=2 * reaches_all + orders,
                    channel=times,
                    share=share,
                    fit=other,
                )

    def exchange_reduced(self, count, times=1, *, orders=True, shifts=(0, 0), share=0):
        """As exchange(), with slices of `count` elements that are reduced over the ranks."""
        num_actors = len(self._calls[0])
        sent = [self.inputs(count * times) for _ in range(num_actors)]
        sums = [oracle.all_reduce(values, self.op) for values in sent]
        slices = [
            [each[time * count : (time + 1) * count] for each in sums] for time in range(times)
        ]
        for rank in self.ranks:
            for actor in range(num_actors):
                want = _collected(actor, num_actors, slices, share, count)
                at = self._place(rank, sent[actor][rank], is_written=False, shift=shifts[0])
                what = f"sums of slices of {count} {self.dtype}"
                out = self._place(rank, want, is_written=True, shift=shifts[1], what=what)
                self.call(
                    *(actor, rank, "grid_exchange"),
                    input=self._address(rank, at),
                    output=self._address(rank, out),
                    count=count,
                    peer=4 + orders,
                    channel=times,
                    share=share,
                )
