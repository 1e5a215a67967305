"""One rank of the monokernel: a GPU, or one in the simulator, that decodes a whole request."""

import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import ENDS, as_argument, lib
from ..files.checkpoint import Checkpoint
from ..model.executor import EndedElsewhere, Token, bad_logits, finite
from ..model.program import Op, Program
from ..model.sample import SamplingParams
from ..model.timeline import Stamps
from ..model.variant import TRACING, USUAL, Variant
from ..monokernel import loading, weights
from ..monokernel import task as structs
from ..monokernel.compiled import Kernels, wants_sampling
from ..monokernel.launching import Compiled, Launcher
from ..monokernel.limits import check
from ..monokernel.memory import Arena, GpuArena, SimArena
from ..monokernel.outputs import Outputs, embedded
from ..monokernel.recording import Recording
from ..monokernel.shape import Tuning
from .work import Work

# Seconds between two looks at the tokens, and without a token until the communicator is checked.
_LOOK_S, _CHECK_S = 20e-6, 0.1
# Warps of a block that packs.
_PACKERS = 8


class DeviceExecutor:
    """One rank's weights, KV cache and board on a device: an Executor (executor.py). The
    communicator's backend is "cuda", "hip" or "sim".
    """

    kv_item_bytes = 2
    cpus: Sequence[int] = ()

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
        self._dtype = checkpoint.dtype
        check(self.program, comm.world_size)
        self._launcher = Launcher(comm, warp_size)
        device = self._launcher.device
        self.device = "" if device is None else device.name
        self._arena: Arena = SimArena(comm) if device is None else GpuArena(comm, device)
        # The variant of the kernel that requests use from now on.
        self._variant = USUAL
        self._kernels = Kernels(
            self.program, comm, self._launcher, self._arena, tuning, context, checkpoint.dtype
        )
        self._module, self._sizes = self._kernels.usual
        # Only its waits are used.
        self._device_comm = comm.device_comm(channels=1, max_bytes=64, exchange_bytes=128)
        # Passes that all prefills before made.
        self._passes = 0
        # The state of the request that runs.
        self._is_running = self._makes_tokens = False
        self._work = Work()
        self._is_closed = False
        self.nbytes = self._sizes.weights
        self._loaded = loading.load(
            checkpoint, self.program, comm, self._arena, self._sizes, context, self._pack, progress
        )
        self._task, self._mailbox = self._loaded.task, self._loaded.mailbox
        self.rotations = self._loaded.rotations
        self._outputs = Outputs(
            self.program,
            self._loaded.norms,
            self.program.lanes_of(comm.rank, comm.world_size),
            self.rotations,
            self._sizes.places,
            tuning.splits,
            lambda offset, nbytes: self._arena.read(self._task.boards[comm.rank] + offset, nbytes),
        )
        # Before any rank's kernel waits for another rank, because a GPU may load nothing then.
        self._load(self._kernels.usual)
        # All boards are there. The second time sees that the first one succeeded: from then on
        # waits have the usual limit instead of that of the first call.
        self._launcher.meet()
        self._launcher.meet()

    # ---- memory ----------------------------------------------------------------------------------

    def _pack(self, *place: int) -> None:
        pack = self._module.kernel("pack")
        self._launcher.launch(pack, *place, grid=self._tuning.blocks, warps=_PACKERS)
        # The next matrix comes to the same place.
        self._launcher.wait()

    def _load(self, decoder: Compiled) -> None:
        """Loads kernels onto a GPU, which their first launches do. These read nothing and wait for
        nobody.
        """
        if self._launcher.device is not None:
            self._begin()
            self._set_ids([0], 0)
            self._decoder = decoder
            self._task.only_reads, self._task.num_ids = 1, 0
            if decoder is self._kernels.usual and self._tuning.chunk > 1:
                self._launch_prefill(self._task)
            self._launch_decode()
            self.wait()

    # ---- requests --------------------------------------------------------------------------------

    def prepare(self, params: SamplingParams, *, overlaps: bool = True) -> None:
        """See Executor."""
        form = {"samples": wants_sampling(params), "overlaps": overlaps}
        if not self._kernels.has(self._variant, **form):
            self._load(self._kernels.get(self._variant, **form))

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        num_cached: int = 0,
        overlaps: bool = True,
    ) -> None:
        """See Executor."""
        if not 0 < len(ids) < self.context:
            raise kccl.InvalidArgument(
                f"ids has {len(ids)} tokens, must have at least one and fewer than the context, "
                f"{self.context}"
            )
        num, most = len(params.stop_ids), loading.MOST_STOP_IDS
        if num > most:
            raise kccl.InvalidArgument(f"stop_ids has {num} ids, must have at most {most}")
        self._begin(makes_tokens=True)
        if params.stop_ids:
            self._arena.write(self._task.stop_ids, np.asarray(params.stop_ids, np.int32))
        self._task.num_stop_ids = len(params.stop_ids)
        self._set_ids(ids, num_cached)
        self._task.max_tokens = params.max_tokens
        self._set_sampling(params, overlaps)
        prefill = self._split_off_prefill() if overlaps else None

        def launch() -> None:
            if prefill is not None:
                self._launch_prefill(prefill)
            self._launch_decode()

        if self._launcher.device is not None:
            launch()
        else:
            # In the simulator a launch returns when the kernel has ended.
            self._work.start(launch)

    def tokens(self) -> Iterator[Token]:
        """See Executor."""
        for index in count():
            token = self._await(self._loaded.tokens[index])
            token_id, end = structs.id_and_end(token)
            if end == lib.kKcclEngineBadLogits:
                raise bad_logits(self._dtype)
            if end == lib.kKcclEngineCancelled:
                raise EndedElsewhere
            yield Token(token_id, token.logprob, ENDS[end], time.monotonic())
            if ENDS[end]:
                break
        self.wait()

    def end(self) -> None:
        """See Executor."""
        if self._is_running:
            # Requests without tokens end by themselves, on all ranks after the same launch.
            if self._makes_tokens:
                self._mailbox.cancelled = self._task.number
            self.wait()

    def start_scoring(
        self, ids: Sequence[int], out: NDArray[np.float32], *, writes_shared: bool
    ) -> None:
        """See Executor."""
        self._check_ids(ids)
        ids = list(ids)

        def work() -> None:
            for first in range(0, len(ids), loading.SCORED_AT_ONCE):
                some = ids[: first + loading.SCORED_AT_ONCE]
                self._run_ids(some, first, logits=self._loaded.logits)
                if writes_shared:
                    out[first : len(some)] = finite(self._scored(len(some) - first), self._dtype)

        self._begin()
        self._work.start(work)

    def start_trace(
        self, ids: Sequence[int], op: Op, out: NDArray[np.float32], *, writes_shared: bool
    ) -> None:
        """See Executor."""
        self._check_ids(ids)
        ids = list(ids)
        c = self.program.config

        def work() -> None:
            for position, token in enumerate(ids):
                self._run_ids(ids[: position + 1], position, logits=self._loaded.logits)
                if op.shape[0] == 1 and not writes_shared:
                    continue
                if op.kind == "embed":
                    at = self._task.embedding + 2 * c.hidden * token
                    row = embedded(self._arena.read(at, 2 * c.hidden), self._dtype)
                    found = {each: row for each in self._outputs.residuals()}
                elif op.kind == "head":
                    found = {0: self._scored(1)[0]}
                else:
                    found = self._outputs.of(op, position)
                for index, values in found.items():
                    out[index, position] = values

        self._begin()
        self._work.start(work)

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """See Executor."""
        return out

    def start_streaming(self, turns: int) -> None:
        """See Executor."""

        def work() -> None:
            self._set_ids([0], 0)
            self._task.max_tokens, self._task.only_reads = turns, 1
            self._launch_decode()
            self._launcher.wait()

        self._begin()
        self._work.start(work)

    def use(self, variant: Variant) -> None:
        """See Executor."""
        self._variant = variant
        self.prepare(SamplingParams())

    def start_timeline(
        self, ids: Sequence[int], num_cached: int, rounds: int, out: list[Stamps]
    ) -> None:
        """See Executor."""
        ids = list(ids)

        def work() -> None:
            module, sizes = self._kernels.get(self._variant)
            numbers = self._tuning.blocks, sizes.stamps, rounds
            recording = Recording(self._comm, self._launcher, self._arena, module, *numbers)
            self._set_ids(ids, num_cached)
            self._task.max_tokens, self._task.num_stop_ids = rounds, 0
            recording.give_to(self._task)
            self._launch_decode()
            self._launcher.wait()
            self._comm.check()
            out.append(recording.read(self.program, self._comm.rank))

        if self._variant != TRACING:
            raise kccl.InvalidArgument("the kernel in use does not trace: call use(TRACING)")
        self._begin()
        self._work.start(work)

    def wait(self) -> float:
        """See Executor."""
        if self._is_running:
            try:
                self._work.join()
            finally:
                self._launcher.wait()
                self._is_running = False
            self._comm.check()
        return self._work.seconds

    def close(self) -> None:
        """See Executor."""
        self._is_closed = True
        self.end()

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not 0 < len(ids) <= self.context:
            raise kccl.InvalidArgument(
                f"ids has {len(ids)} tokens, must have at least one and at most the context, "
                f"{self.context}"
            )

    def _begin(self, *, makes_tokens: bool = False) -> None:
        """Notes that a request runs."""
        if self._is_closed:
            raise kccl.Error("the engine is closed")
        if self._is_running:
            raise kccl.Error(f"rank {self._comm.rank} still works on the request before")
        self._is_running, self._makes_tokens = True, makes_tokens

    def _set_ids(self, ids: Sequence[int], first: int) -> None:
        """Gives a task its ids, of which those from `first` on are to run."""
        task = self._task
        self._arena.write(task.ids, np.asarray(ids, np.int32))
        task.num_ids, task.start = len(ids), first
        task.round, task.exchange = self._mailbox.rounds, self._mailbox.exchanges
        task.number += 1
        task.max_tokens = task.only_reads = task.marks = task.traced = 0
        task.logits = structs.NO_LOGITS
        self._decoder = self._kernels.get(self._variant)

    def _set_sampling(self, params: SamplingParams, overlaps: bool) -> None:
        """Gives a task what chooses its tokens."""
        self._decoder = self._kernels.get(
            self._variant, samples=wants_sampling(params), overlaps=overlaps
        )
        self._task.marks = self._loaded.marks if params.repetition_penalty != 1 else 0
        self._task.sampling = structs.sampling_of(params)

    def _run_ids(self, ids: Sequence[int], first: int, *, logits: Sequence[int]) -> None:
        """Runs the ids from `first` on, and returns when this rank's kernel has ended."""
        self._set_ids(ids, first)
        self._task.logits = list(logits)
        self._launch_decode()
        self._launcher.wait()
        self._comm.check()

    def _scored(self, num: int) -> NDArray[np.float32]:
        """What the last run has written of the logits of its first `num` positions."""
        vocab_size = self.program.config.vocab_size
        nbytes = 4 * num * vocab_size
        data = self._arena.read(self._loaded.logits[self._comm.rank], nbytes)
        return np.frombuffer(data, np.float32).reshape(num, vocab_size)

    def _split_off_prefill(self) -> Any:
        """Leaves the last id to decode; the task that runs the others in chunks, or None."""
        task, chunk = self._task, self._tuning.chunk
        first, last = task.start, task.num_ids - 1
        if chunk == 1 or first == last:
            return None
        prefill = structs.new_task(task)
        task.start = prefill.num_ids = last
        prefill.round = self._passes
        # All ranks have the same number; a failed request is the last one.
        self._passes += -(-(last - first) // chunk)
        return prefill

    def _launch_prefill(self, task: Any) -> None:
        warps = self._tuning.chunk_warps + self._tuning.chunk_others
        self._launch(self._module, "prefill", task, warps, self._sizes.prefill_shared)

    def _launch_decode(self) -> None:
        (module, sizes), warps = self._decoder, self._tuning.warps + self._tuning.others
        self._launch(module, "decode", self._task, warps, sizes.shared)

    def _launch(self, module: Any, name: str, task: Any, warps: int, nbytes: int) -> None:
        """Launches a kernel on all blocks, with so many bytes of shared memory each."""
        blocks, arguments = self._tuning.blocks, (self._device_comm, as_argument(task))
        kernel = module.kernel(name)
        self._launcher.launch(kernel, *arguments, grid=blocks, warps=warps, shared_bytes=nbytes)

    def _await(self, token: Any) -> Any:
        """Waits for the kernel to write a token. Raises if it fails so that it cannot."""
        number, looked = self._task.number, time.monotonic()
        while token.number != number or token.number_again != number:
            if self._is_closed:
                raise kccl.Error("the engine is closed")
            if self._work.has_failed:
                self.wait()
            if time.monotonic() - looked > _CHECK_S:
                self._comm.check()
                self._launcher.check()
                looked = time.monotonic()
            time.sleep(_LOOK_S)
        return token
