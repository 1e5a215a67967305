"""One rank of the monokernel: a GPU, or one in the simulator, that decodes a whole request."""

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..checkpoint import Checkpoint
from ..monokernel import weights
from ..monokernel.memory import Arena, GpuArena, SimArena
from ..monokernel.shape import KERNELS, Tuning, check, kernels_of, source_of
from ..monokernel.task import Layer, Mailbox, Module, Task, Token
from ..program import Op, Program

# As kernels/task.cuh numbers the ends of a request.
_BAD_LOGITS = 5
_MOST_STOP_IDS = 64
# Seconds between two looks at the tokens, and without a token until the communicator is checked.
_LOOK_S, _CHECK_S = 20e-6, 0.1
# Warps of a block that packs.
_PACKERS = 8


class DeviceExecutor:
    """One rank's weights, KV cache and board on a device. All ranks make the same calls.

    The communicator's backend is "cuda" or "sim". Tokens are the most likely ones.

    Attributes:
        program: The model's program.
        context: Positions that the KV cache has room for.
        nbytes: Of this rank's packed weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        comm: kccl.Communicator,
        *,
        tuning: Tuning,
        context: int,
        warp_size: int = 32,
        progress: weights.Progress = lambda nbytes: None,
    ) -> None:
        """Compiles the kernel for the model's shape, and packs this rank's weights. Collective.

        Args:
            checkpoint: The model; may be closed afterwards.
            comm: Its ranks share the lanes. It stays open as long as this.
            tuning: How the device is used; the same on all ranks.
            context: Positions to make room for.
            warp_size: Of the simulated device.
            progress: Called with the number of bytes that were packed since the last call.

        Raises:
            InvalidArgument: The monokernel cannot run the model on so many ranks.
            BackendError: There is no memory, no compiler, or the driver refused.
        """
        self.program = Program(checkpoint.config)
        self.context = context
        self._comm = comm
        self._tuning = tuning
        self._warp_size = warp_size
        check(self.program, comm.world_size)
        self._module = kccl.compile(
            source_of(self.program, comm.world_size, context, tuning),
            kernels_of(tuning),
            target=comm.backend,
            warp_size=warp_size,
            include_dirs=[KERNELS],
        )
        self._device: Any = None
        self._stream: Any = None
        self._arena: Arena
        if comm.backend == "sim":
            self._arena = SimArena(comm)
        else:
            self._device = kccl.gpu.device(comm.empty(1).device)
            self._arena = GpuArena(comm, self._device)
            with self._device.current():
                self._stream = kccl.gpu.make_stream()
        # Only its waits are used.
        self._device_comm = comm.device_comm(channels=1, max_bytes=64, exchange_bytes=128)
        self._task = Task()
        # Passes that all prefills before made.
        self._passes = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The address and the size of the logits' memory.
        self._logits = (0, 0)
        self._describe()
        self._load(checkpoint, progress)
        # All boards are there. The second barrier sees that the first one succeeded: from then on
        # waits have the usual limit instead of that of the first call.
        comm.barrier()
        comm.barrier()
        self._wait_for_device()

    # ---- memory ----------------------------------------------------------------------------------

    def _launch(self, name: str, *args: Any, grid: int, warps: int, shared_bytes: int = 0) -> None:
        with self._device.current() if self._device else nullcontext():
            self._module.kernel(name)(
                self._comm,
                *args,
                grid=grid,
                block=warps * self._warp_size,
                shared_bytes=shared_bytes,
                stream=self._stream,
            )

    def _wait_for_device(self) -> None:
        if self._device is not None:
            kccl.gpu.synchronize(self._device)

    def _describe(self) -> None:
        """Asks the device what kernels/pack.cuh tells of the shape."""
        nbytes = 5 * 8
        numbers = self._arena.allocate(nbytes)
        self._launch("describe", numbers, grid=1, warps=1)
        self._wait_for_device()
        found = np.frombuffer(self._arena.read(numbers, nbytes), np.uint64)
        self._shared_bytes, self._board_bytes, self.nbytes, self._cache_bytes = map(int, found[:4])
        self._prefill_shared_bytes = int(found[4])

    def _load(self, checkpoint: Checkpoint, progress: weights.Progress) -> None:
        program, arena, task = self.program, self._arena, self._task
        rank, world_size = self._comm.rank, self._comm.world_size
        c = program.config
        num = c.num_lanes // world_size
        task.weights = arena.allocate(self.nbytes)
        staging = arena.allocate(weights.most_bytes(program, world_size))
        lanes = range(rank * num, (rank + 1) * num)
        for product, layer, group, matrix in weights.matrices(
            checkpoint, program, lanes, rank, world_size
        ):
            arena.write(staging, matrix)
            place = (task.weights, staging, product, layer, group)
            self._launch("pack", *place, grid=self._tuning.blocks, warps=_PACKERS)
            # The next matrix comes to the same place.
            self._wait_for_device()
            progress(matrix.nbytes)
        task.embedding = arena.place(weights.embedding(checkpoint, program))
        task.norms = arena.place(weights.norms(checkpoint, program))
        if c.has_qk_norm:
            task.qk_norms = arena.place(weights.qk_norms(checkpoint, program))
        cosines, sines = program.rotations(self.context)
        task.cosines, task.sines = arena.place(cosines), arena.place(sines)
        task.cache = arena.allocate(self._cache_bytes)
        task.layers = arena.place(np.frombuffer(self._layers(), np.uint8))
        for each, address in enumerate(arena.shared(self._board_bytes)):
            task.boards[each] = address
        task.ids = arena.allocate(4 * self.context)
        task.stop_ids = arena.allocate(4 * _MOST_STOP_IDS)
        task.tokens = arena.on_host(ctypes.sizeof(Token) * self.context)
        task.mailbox = arena.on_host(ctypes.sizeof(Mailbox))
        self._tokens = (Token * self.context).from_address(task.tokens)
        self._mailbox = Mailbox.from_address(task.mailbox)

    def _layers(self) -> bytes:
        """The layers' rules, as kernels/task.cuh has them."""

        def rule(op: Op) -> Module:
            receives = -1 if op.receives is None else op.receives
            return Module(op.own_scale, receives, int(op.is_blocking), int(op.sends))

        ops = self.program.by_name
        layers = [
            Layer(
                rule(ops[f"layers.{i}.out"]),
                rule(ops[f"layers.{i}.down"]),
                ops[f"layers.{i}.attend"].window,
            )
            for i in range(self.program.config.num_layers)
        ]
        return b"".join(map(bytes, layers))

    # ---- requests --------------------------------------------------------------------------------

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Iterator[tuple[int, float]]:
        """Yields the most likely tokens after `ids`, until a stop id, which it yields too, or
        max_tokens, or the end of the context.

        Yields:
            A token, and when it was seen, by time.monotonic(). In the simulator all come at the
            end.

        Raises:
            InvalidArgument: An argument is wrong.
            kccl.Error: The logits are NaN. Or a rank was lost, or did not come.
        """
        if not 0 < len(ids) < self.context:
            raise kccl.InvalidArgument(
                f"ids has {len(ids)} tokens, must have at least one and fewer than the context, "
                f"{self.context}"
            )
        if len(stop_ids) > _MOST_STOP_IDS:
            raise kccl.InvalidArgument(
                f"stop_ids has {len(stop_ids)} ids, must have at most {_MOST_STOP_IDS}"
            )
        self._start(ids, max_tokens=max_tokens, stop_ids=stop_ids)
        has_ended = False
        try:
            if self._device is None:
                self._finish()
            for index in range(max_tokens):
                token = self._await(self._tokens[index])
                has_ended = token.end != 0
                if token.end == _BAD_LOGITS:
                    raise kccl.Error("the model's logits are NaN, or none is finite")
                yield token.id, time.monotonic()
                if has_ended:
                    break
        finally:
            if not has_ended:
                # The caller has enough. Every rank ends its iterator: rank 0 decides for all.
                self._mailbox.cancelled = self._task.number
            self._finish()

    def logits(self, ids: Sequence[int], *, last: int | None = None) -> NDArray[np.float32]:
        """The logits after each id, or after each of the `last` ids: float32 [ids, vocab_size]. Of
        other ranks' parts of the vocabulary they are undefined.

        Raises:
            InvalidArgument: No ids, or more than the context; or `last` is not a number of them.
            kccl.Error: A rank was lost, or did not come.
        """
        if not 0 < len(ids) <= self.context:
            raise kccl.InvalidArgument(
                f"ids has {len(ids)} tokens, must have at least one and at most the context, "
                f"{self.context}"
            )
        num = len(ids) if last is None else last
        if not 0 < num <= len(ids):
            raise kccl.InvalidArgument(f"last is {last}, must be from 1 to {len(ids)}")
        vocab_size = self.program.config.vocab_size
        # Positions that are not read in chunks have logits too.
        first_row = len(ids) - num if self._tuning.chunk > 1 else 0
        nbytes = 4 * (len(ids) - first_row) * vocab_size
        if self._logits[1] < nbytes:
            self._logits = self._arena.allocate(nbytes), nbytes
        self._start(ids, logits=self._logits[0], first_row=first_row)
        self._finish()
        data = np.frombuffer(self._arena.read(self._logits[0], nbytes), np.float32)
        return data.reshape(-1, vocab_size)[-num:]

    def read_weights(self, turns: int) -> None:
        """Reads all weights so many times as decoding does, and does nothing else."""
        self._start([0], max_tokens=turns, only_reads=True)
        self._finish()

    def _start(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        logits: int = 0,
        first_row: int | None = None,
        only_reads: bool = False,
    ) -> None:
        """Begins a request. first_row: the first position whose logits are wanted; None: the last
        one. Those before it are read in chunks.
        """
        task = self._task
        self._arena.write(task.ids, np.asarray(ids, np.int32))
        if stop_ids:
            self._arena.write(task.stop_ids, np.asarray(stop_ids, np.int32))
        task.num_ids, task.num_stop_ids = len(ids), len(stop_ids)
        task.max_tokens, task.logits, task.only_reads = max_tokens, logits, only_reads
        task.round, task.number = self._mailbox.rounds, task.number + 1

        task.start = 0
        if self._tuning.chunk > 1 and not only_reads:
            task.start = len(ids) - 1 if first_row is None else first_row
        prefill = Task.from_buffer_copy(task)
        prefill.start, prefill.num_ids, prefill.round = 0, task.start, self._passes
        # The same on all ranks; a failed request is the last one.
        self._passes += -(-task.start // self._tuning.chunk)

        def launch() -> None:
            if prefill.num_ids:
                self._launch(
                    "prefill",
                    self._device_comm,
                    prefill,
                    grid=self._tuning.blocks,
                    warps=self._tuning.chunk_warps + 1,
                    shared_bytes=self._prefill_shared_bytes,
                )
            self._launch(
                "decode",
                self._device_comm,
                task,
                grid=self._tuning.blocks,
                warps=self._tuning.warps + 1,
                shared_bytes=self._shared_bytes,
            )

        def run() -> None:
            try:
                launch()
            except BaseException as error:
                self._failure = error

        if self._device is not None:
            launch()
            return
        # In the simulator a launch returns when the kernel has ended.
        self._thread = threading.Thread(target=run, name="kccl decode")
        self._thread.start()

    def _await(self, token: Token) -> Token:
        """Waits for the kernel to write a token of this request."""
        number, looked = self._task.number, time.monotonic()
        while token.number != number or token.number_again != number:
            if time.monotonic() - looked > _CHECK_S:
                self._comm.check()
                looked = time.monotonic()
            time.sleep(_LOOK_S)
        return token

    def _finish(self) -> None:
        """Waits until the kernel has ended, and raises if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._wait_for_device()
        self._comm.check()
