"""Ranks of the library on the machine of gcn_machine.py: their windows and states, and calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from device_compilers import compile_hip
from gcn_machine import Launch, Program, Report, run

import kccl
from kccl.backends.calls import fill_call
from kccl.backends.scratch import make_comm
from kccl.backends.settings import Settings
from kccl.base.abi import ffi
from kccl.jit import cache as jit_cache
from kccl.jit import names
from kccl.plan.specs import BY_NAME

INCLUDE = Path(kccl.include_dir())
LIMIT_NS = 10**9
# Kernels that make many calls.
CHAIN = Path(__file__).with_name("chain.cuh")


@cache
def compiled(source: str, *options: str) -> str:
    """The assembly of a translation unit. options: more of clang's."""
    with TemporaryDirectory() as folder:
        return compile_hip(source, "gfx942", Path(folder), INCLUDE, options)


@cache
def kernel_assembly(kernel: str, dtype: str, op: str, world_size: int) -> str:
    """The assembly of one instance of one of the library's kernels."""
    source = f"#include <kccl/kernels/{kernel}.cuh>\n"
    name = names.expression(kernel, dtype, op, jit_cache.CSRC, world_size)
    if "<" in name:
        source += f"template KCCL_KERNEL void {name}(const KcclCall);\n"
    return compiled(source)


@cache
def kernel_program(
    kernel: str, dtype: str = "float32", op: str = "sum", world_size: int = 0
) -> Program:
    return Program(kernel_assembly(kernel, dtype, op, world_size))


@dataclass(frozen=True)
class Sizes:
    """The sizes of each rank's scratch."""

    num_channels: int = 1
    blocks_per_channel: int = 8
    packet_bytes: int = 8192
    staging_bytes: int = 8192
    exchange_bytes: int = 8192

    def settings(self) -> Settings:
        return Settings(
            num_channels=self.num_channels,
            blocks_per_channel=self.blocks_per_channel,
            packet_bytes=self.packet_bytes,
            staging_bytes=self.staging_bytes,
            exchange_bytes=self.exchange_bytes,
        )


CHANNEL_TURN_BYTES = 128 * 256
"""Behind so many bytes the channels take turns anew: kChannels and kChannelBytes in
interpreter/flights.cpp.
"""


class World:
    """The ranks' memory, as before the first call."""

    def __init__(
        self,
        world_size: int,
        sizes: Sizes = Sizes(),  # frozen
        grid_counters: int | None = None,
    ) -> None:
        self.world_size = world_size
        self._arrays: list[np.ndarray[Any, Any]] = []
        settings = sizes.settings()
        self._layout = settings.layout(world_size)
        self._scratch = [self._aligned(self._layout["scratch_bytes"]) for _ in range(world_size)]
        self._states = [self._aligned(ffi.sizeof("KcclState")) for _ in range(world_size)]
        channel_bytes = ffi.sizeof("KcclChannelState") * settings.scratch_channels
        self._channels = [self._aligned(channel_bytes) for _ in range(world_size)]
        addresses = tuple(each.ctypes.data for each in self._scratch)
        self.comms = [
            make_comm(
                settings,
                rank=rank,
                addresses=addresses,
                scratch=addresses,
                state=ffi.cast("KcclState *", self._states[rank].ctypes.data),
                channels=ffi.cast("KcclChannelState *", self._channels[rank].ctypes.data),
                polls_per_check=1000,
                grid_counters=grid_counters,
            )
            for rank in range(world_size)
        ]
        self._regions = [
            (each.ctypes.data, each.nbytes, rank)
            for arrays in (self._scratch, self._states, self._channels)
            for rank, each in enumerate(arrays)
        ]
        for rank in range(world_size):
            self._scratch[rank][self._layout["sentinel"] :] = 0xFF
            state = ffi.cast("KcclState *", self._states[rank].ctypes.data)
            state.limit_ns = state.first_limit_ns = LIMIT_NS

    @staticmethod
    def _aligned(nbytes: int) -> "np.ndarray[Any, Any]":
        """Zeros that begin in the first of the memory's channels, wherever the host has them. So
        estimates are the same in each run. No two share a line of a cache.
        """
        whole = np.zeros(nbytes + CHANNEL_TURN_BYTES + 256, np.uint8)
        begin = -whole.ctypes.data % CHANNEL_TURN_BYTES
        return whole[begin : begin + -(-nbytes // 256) * 256]

    def array(self, rank: int, values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """A copy of values in the memory of a rank's GPU."""
        memory = self._aligned(values.nbytes)
        self._arrays.append(memory)
        self._regions.append((memory.ctypes.data, memory.nbytes, rank))
        out = memory[: values.nbytes].view(values.dtype).reshape(values.shape)
        out[:] = values
        return out

    def status(self, rank: int) -> int:
        return int(ffi.cast("KcclState *", self._states[rank].ctypes.data).status)

    def comm_bytes(self, rank: int) -> bytes:
        """The KcclDeviceComm of a rank, as kernels take it."""
        return bytes(ffi.buffer(self.comms[rank]))

    def call(
        self,
        rank: int,
        kernel: str,
        *,
        input: "np.ndarray[Any, Any] | None" = None,
        output: "np.ndarray[Any, Any] | None" = None,
        count: int | None = None,
        dtype: str = "float32",
        op: str = "sum",
        grid: int = 1,
        block: int = 64,
        program: Program | None = None,
        **more: int,
    ) -> Launch:
        """A launch of one of the library's kernels, of the instance for this number of ranks.

        Args:
            rank: Who makes the call.
            kernel: Its name.
            input, output: Arrays that array() made.
            count: As KcclCall's; None: the input's elements, or bytes where a kernel counts bytes.
            dtype, op: For kernels that reduce.
            grid, block: Blocks, and threads of a block.
            program: Runs instead of what the compiler wrote.
            more: Other fields of KcclCall.
        """
        if count is None:
            count = 0 if input is None else input.size if "reduce" in kernel else input.nbytes
        call = ffi.new("KcclCall *")
        addresses = [0 if each is None else each.ctypes.data for each in (input, output)]
        fields = {"input": addresses[0], "output": addresses[1], "count": count, **more}
        fields.setdefault("share", BY_NAME[kernel].share(count, dtype, grid))
        fill_call(call, self.comms[rank], kernel, dtype, op, **fields)
        program = program or kernel_program(kernel, dtype, op, self.world_size)
        symbol = program.symbol(f"_ZN4kccl7kernels{len(kernel)}{kernel}")
        return Launch(rank, program, symbol, bytes(ffi.buffer(call)), grid, block)

    def run(self, launches: Sequence[Launch], *, seed: int = 0, **more: Any) -> Report:
        """As gcn_machine.run(); the memory keeps what earlier runs left."""
        return run(launches, self._regions, world_size=self.world_size, seed=seed, **more)
