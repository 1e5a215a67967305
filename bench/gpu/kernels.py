"""Kernels that the benchmarks on GPUs need for themselves: a pause of known length with a time
stamp, and the ping-pongs that give the floors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kccl

from ..harness.collective import Array, Comm

SOURCE = r"""
#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;

// Waits delays[step] nanoseconds, then notes the time in stamps[step]. One thread does it.
KCCL_KERNEL void pause_step(const uint32_t* delays, uint64_t* stamps, uint32_t step) {
    if (kccl::platform::thread_in_block() != 0) return;
    const uint64_t begin = kccl::mem::clock_ns();
    const uint64_t delay = kccl::mem::load_plain(delays + step);
    uint64_t now = begin;
    while (now - begin < delay) now = kccl::mem::clock_ns();
    kccl::mem::store_plain(stamps + step, now);
}

// Whether `word` becomes `wanted` within the limit. The clock is read now and then only.
template <Scope scope>
KCCL_DEVICE bool becomes(const uint32_t* word, uint32_t wanted, uint64_t limit_ns) {
    uint64_t begin = 0;
    for (uint32_t polls = 1;; ++polls) {
        if (kccl::mem::load<Order::kRelaxed, scope>(word) == wanted) return true;
        kccl::mem::poll_pause();
        if (polls % 4096 != 0) continue;
        const uint64_t now = kccl::mem::clock_ns();
        if (begin == 0) begin = now;
        if (now - begin > limit_ns) return false;
    }
}

// Lines that words take turns in. What a word takes depends on where in the cache its line lies, by
// a tenth and more, and messages lie everywhere.
constexpr uint32_t kPlaces = 64;
constexpr uint32_t kLine = kKcclLineBytes / sizeof(uint32_t);

// The leader writes first + k to its peer's memory and waits for the same in its own; the other
// answers. Relaxed, because the word is all there is. elapsed_ns: of `rounds` round trips, after
// a tenth as many that do not count; 0 when the peer did not answer in time.
template <Scope scope>
KCCL_DEVICE void bounce(const uint32_t* mine, uint32_t* peers, uint32_t first, uint32_t rounds,
                        bool leads, uint64_t limit_ns, uint64_t* elapsed_ns) {
    if (kccl::platform::thread_in_block() != 0) return;
    const uint32_t warmup = rounds / 10;
    uint64_t begin = 0;
    for (uint32_t k = 0; k < warmup + rounds; ++k) {
        if (k == warmup) begin = kccl::mem::clock_ns();
        const uint32_t place = k % kPlaces * kLine;
        if (leads) kccl::mem::store<Order::kRelaxed, scope>(peers + place, first + k);
        if (!becomes<scope>(mine + place, first + k, limit_ns)) {
            kccl::mem::store_plain(elapsed_ns, uint64_t(0));
            return;
        }
        if (!leads) kccl::mem::store<Order::kRelaxed, scope>(peers + place, first + k);
    }
    kccl::mem::store_plain(elapsed_ns, kccl::mem::clock_ns() - begin);
}

// Between two ranks.
KCCL_KERNEL void ping_pong(const uint32_t* mine, uint32_t* peers, uint32_t first, uint32_t rounds,
                           bool leads, uint64_t limit_ns, uint64_t* elapsed_ns) {
    bounce<Scope::kSystem>(mine, peers, first, rounds, leads, limit_ns, elapsed_ns);
}

// Between two blocks of a GPU: words of the one, then of the other.
KCCL_KERNEL void ping_pong_blocks(uint32_t* words, uint32_t first, uint32_t rounds,
                                  uint64_t limit_ns, uint64_t* elapsed_ns) {
    const uint32_t index = kccl::platform::block_in_grid();
    constexpr uint32_t kAll = kPlaces * kLine;
    bounce<Scope::kDevice>(words + index * kAll, words + (1 - index) * kAll, first, rounds,
                           index == 0, limit_ns, elapsed_ns + index);
}
"""
NAMES = ("pause_step", "ping_pong", "ping_pong_blocks")

ROUNDS = 2000
_LIMIT_NS = 5_000_000_000
LINE_BYTES = 128
PLACES_BYTES = 64 * LINE_BYTES
"""Of the lines that one side's words take turns in."""


class PingPong:
    """Half a round trip of a word between the memories of ranks 0 and 1, each polled by its owner.

    The others take part in what is collective and wait.
    """

    def __init__(self, comm: Comm, module: Any) -> None:
        """Makes the window. Collective.

        Args:
            comm: Of two ranks or more.
            module: SOURCE compiled for its backend.
        """
        self._comm = comm
        self._kernel = module.kernel("ping_pong")
        self._window = comm.window(PLACES_BYTES)
        self._first = 1

    def enqueue(self, elapsed_ns: Any, *, rounds: int = ROUNDS, stream: Any = None) -> None:
        """Starts the exchange on ranks 0 and 1; `elapsed_ns` is an array of one 64-bit integer."""
        rank = self._comm.rank
        first, self._first = self._first, self._first + rounds + rounds // 10
        if rank > 1:
            return
        addresses = self._window.addresses
        self._kernel(
            self._comm,
            addresses[rank],
            addresses[1 - rank],
            np.uint32(first),
            np.uint32(rounds),
            rank == 0,
            _LIMIT_NS,
            elapsed_ns,
            block=32,
            stream=stream,
        )

    def one_way_us(self, elapsed_ns: int, *, rounds: int = ROUNDS) -> float:
        """Microseconds one way, from what rank 0 measured. Collective.

        Raises:
            kccl.Timeout: One of the two did not answer.
        """
        told = self._comm.gather_objects(elapsed_ns if self._comm.rank < 2 else None)[:2]
        if 0 in told:
            raise kccl.Timeout(
                "ranks 0 and 1 did not answer each other in the ping-pong",
                rank=self._comm.rank,
                peer=told.index(0) ^ 1,
                collective="ping-pong",
            )
        return float(told[0]) / rounds / 2 / 1e3


class BlockPingPong:
    """Half a round trip of a word between two blocks of a GPU."""

    def __init__(self, comm: Comm, module: Any, words: Any) -> None:
        """As PingPong.

        Args:
            comm: Whose GPU.
            module: SOURCE compiled for its backend.
            words: An array of zeros, of twice PLACES_BYTES.
        """
        self._comm = comm
        self._kernel = module.kernel("ping_pong_blocks")
        self._words = words
        self._first = 1

    def enqueue(self, elapsed_ns: Any, *, rounds: int = ROUNDS, stream: Any = None) -> None:
        """Starts the exchange; `elapsed_ns` is an array of two 64-bit integers."""
        first, self._first = self._first, self._first + rounds + rounds // 10
        numbers = np.uint32(first), np.uint32(rounds), _LIMIT_NS
        self._kernel(
            *(self._comm, self._words, *numbers, elapsed_ns), grid=2, block=32, stream=stream
        )

    def one_way_us(self, elapsed_ns: Array, *, rounds: int = ROUNDS) -> float:
        """Microseconds one way.

        Raises:
            kccl.Timeout: One of the two did not answer.
        """
        if 0 in elapsed_ns:
            raise kccl.Timeout(
                "two blocks of a GPU did not answer each other in the ping-pong",
                rank=self._comm.rank,
                peer=self._comm.rank,
                collective="ping-pong",
            )
        return float(elapsed_ns[0]) / rounds / 2 / 1e3
