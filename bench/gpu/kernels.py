"""The benchmarks' own kernels on GPUs: a pause of known length with a time stamp, and ping-pongs
that measure the floors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kccl

from ..harness.problem import Array, Comm

_LINES = 64
LINE_BYTES = 128
LINES_BYTES = _LINES * LINE_BYTES
"""Bytes of the lines that one side of a ping-pong uses in turn."""

SOURCE = r"""
#include <kccl/kccl.cuh>

using kccl::mem::Order;
using kccl::mem::Scope;

// Waits delays[step] nanoseconds, then stores the time in stamps[step]. Only thread 0 works.
KCCL_KERNEL void pause_step(const uint32_t* delays, uint64_t* stamps, uint32_t step) {
    if (kccl::platform::thread_in_block() != 0) return;
    const uint64_t begin = kccl::mem::clock_ns();
    const uint64_t delay = kccl::mem::load_plain(delays + step);
    uint64_t now = begin;
    while (now - begin < delay) now = kccl::mem::clock_ns();
    kccl::mem::store_plain(stamps + step, now);
}

// Whether `word` becomes `wanted` within the limit. The clock is read once in 4096 polls.
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

// The rounds use this many cache lines in turn. Why: the latency of a word depends on the position
// of its line in the cache, by a tenth and more, and messages have lines at all positions.
constexpr uint32_t kLines = LINES;
constexpr uint32_t kLineWords = kKcclLineBytes / sizeof(uint32_t);

// In round k the leader stores first + k in its peer's memory and polls its own memory for the same
// value; the other side answers. Relaxed order suffices, because the word is all the data.
// elapsed_ns: nanoseconds of `rounds` round trips, after rounds / 10 untimed ones; 0 if the peer
// did not answer in time.
template <Scope scope>
KCCL_DEVICE void bounce(const uint32_t* mine, uint32_t* peers, uint32_t first, uint32_t rounds,
                        bool leads, uint64_t limit_ns, uint64_t* elapsed_ns) {
    if (kccl::platform::thread_in_block() != 0) return;
    const uint32_t warmup = rounds / 10;
    uint64_t begin = 0;
    for (uint32_t k = 0; k < warmup + rounds; ++k) {
        if (k == warmup) begin = kccl::mem::clock_ns();
        const uint32_t line = k % kLines * kLineWords;
        if (leads) kccl::mem::store<Order::kRelaxed, scope>(peers + line, first + k);
        if (!becomes<scope>(mine + line, first + k, limit_ns)) {
            kccl::mem::store_plain(elapsed_ns, uint64_t(0));
            return;
        }
        if (!leads) kccl::mem::store<Order::kRelaxed, scope>(peers + line, first + k);
    }
    kccl::mem::store_plain(elapsed_ns, kccl::mem::clock_ns() - begin);
}

// Between two ranks.
KCCL_KERNEL void ping_pong(const uint32_t* mine, uint32_t* peers, uint32_t first, uint32_t rounds,
                           bool leads, uint64_t limit_ns, uint64_t* elapsed_ns) {
    bounce<Scope::kSystem>(mine, peers, first, rounds, leads, limit_ns, elapsed_ns);
}

// Between two blocks of a GPU. words: those of block 0, then those of block 1.
KCCL_KERNEL void ping_pong_blocks(uint32_t* words, uint32_t first, uint32_t rounds,
                                  uint64_t limit_ns, uint64_t* elapsed_ns) {
    const uint32_t index = kccl::platform::block_in_grid();
    constexpr uint32_t kAll = kLines * kLineWords;
    bounce<Scope::kDevice>(words + index * kAll, words + (1 - index) * kAll, first, rounds,
                           index == 0, limit_ns, elapsed_ns + index);
}
""".replace("LINES", str(_LINES))
NAMES = ("pause_step", "ping_pong", "ping_pong_blocks")

ROUNDS = 2000
_LIMIT_NS = 5_000_000_000


class PingPong:
    """Measures half a round trip of a word between the memories of ranks 0 and 1.

    Each rank polls its own memory. Ranks above 1 only take part in the collective calls.
    """

    def __init__(self, comm: Comm, module: Any) -> None:
        """Allocates the window. Collective.

        Args:
            comm: A communicator of two ranks or more.
            module: SOURCE, compiled for the communicator's backend.
        """
        self._comm = comm
        self._kernel = module.kernel("ping_pong")
        self._block = module.warp_size
        self._window = comm.window(LINES_BYTES)
        self._first = 1

    def enqueue(self, elapsed_ns: Any, *, rounds: int = ROUNDS, stream: Any = None) -> None:
        """Launches the kernel on ranks 0 and 1; `elapsed_ns` is a device array of one int64."""
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
            block=self._block,
            stream=stream,
        )

    def one_way_us(self, elapsed_ns: int, *, rounds: int = ROUNDS) -> float:
        """Returns the one-way latency in microseconds, from rank 0's time. Collective.

        Raises:
            kccl.Timeout: One of the two ranks did not answer.
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
    """Measures half a round trip of a word between two blocks of a GPU."""

    def __init__(self, comm: Comm, module: Any, words: Any) -> None:
        """Keeps the kernel and the words of the ping-pong.

        Args:
            comm: The communicator that uses the GPU.
            module: SOURCE, compiled for the communicator's backend.
            words: A zeroed device array of twice LINES_BYTES.
        """
        self._comm = comm
        self._kernel = module.kernel("ping_pong_blocks")
        self._block = module.warp_size
        self._words = words
        self._first = 1

    def enqueue(self, elapsed_ns: Any, *, rounds: int = ROUNDS, stream: Any = None) -> None:
        """Launches the kernel; `elapsed_ns` is a device array of two int64."""
        first, self._first = self._first, self._first + rounds + rounds // 10
        numbers = np.uint32(first), np.uint32(rounds), _LIMIT_NS
        self._kernel(
            *(self._comm, self._words, *numbers, elapsed_ns),
            grid=2,
            block=self._block,
            stream=stream,
        )

    def one_way_us(self, elapsed_ns: Array, *, rounds: int = ROUNDS) -> float:
        """Returns the one-way latency in microseconds.

        Raises:
            kccl.Timeout: One of the two blocks did not answer.
        """
        if 0 in elapsed_ns:
            raise kccl.Timeout(
                "two blocks of a GPU did not answer each other in the ping-pong",
                rank=self._comm.rank,
                peer=self._comm.rank,
                collective="ping-pong",
            )
        return float(elapsed_ns[0]) / rounds / 2 / 1e3
