"""The calls of a sim_programs.Script in which blocks exchange slices."""

import numpy as np
import oracle
from sim_machine import UNTOUCHED


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


class Exchanges:
    """One of Script's base classes, with these calls."""

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
        sent = [self.random_bytes(nbytes * times) for _ in range(num_actors)]
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
                at = self.place(rank, mine, is_written=False, shift=shifts[0])
                what = f"slices of {nbytes} bytes"
                out = self.place(rank, want, is_written=True, shift=shifts[1], what=what)
                self.call(
                    *(actor, rank, kernel),
                    input=self.address(rank, at),
                    output=self.address(rank, out),
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
                at = self.place(rank, sent[actor][rank], is_written=False, shift=shifts[0])
                what = f"sums of slices of {count} {self.dtype}"
                out = self.place(rank, want, is_written=True, shift=shifts[1], what=what)
                self.call(
                    *(actor, rank, "grid_exchange"),
                    input=self.address(rank, at),
                    output=self.address(rank, out),
                    count=count,
                    peer=4 + orders,
                    channel=times,
                    share=share,
                )
