"""Runs one rank of the monokernel, which decodes a whole request on a GPU or in the simulator."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..files.checkpoint import Checkpoint
from ..files.packed_cache import PackedCache
from ..model.drafts import OFF, Drafts
from ..model.executor import BEGINNING, Place, Token, Traced, finite
from ..model.ngrams import Ngrams
from ..model.program import Op, Program
from ..model.sample import SamplingParams
from ..model.timeline import Stamps
from ..model.variant import TRACING, USUAL, Variant
from ..monokernel import answer, keeping, leaving, loading, weights
from ..monokernel import task as structs
from ..monokernel.compiled import Kernels, check_sampling, used_drafts, wants_sampling
from ..monokernel.launching import Compiled, Grids, Launcher
from ..monokernel.limits import check
from ..monokernel.memory import Arena, GpuArena, SimArena
from ..monokernel.outputs import Outputs, embedded
from ..monokernel.recording import Recording
from ..monokernel.shape import Tuning
from .requests import check_ids
from .work import Work

# Seconds between two polls for a token: on a GPU; in the simulator, which polls slow down. Seconds
# without a token after which the communicator is checked.
_LOOK_S, _LOOK_AT_SIMULATOR_S, _CHECK_S = 20e-6, 1e-3, 0.1


class DeviceExecutor:
    """One rank's weights, KV cache and exchange buffer on a device: an Executor (executor.py). The
    communicator's backend is "cuda", "hip" or "sim".
    """

    kv_item_bytes = 2
    traces_several = True
    cpus: Sequence[int] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        comm: kccl.Communicator,
        *,
        tuning: Tuning,
        context: int,
        slots: int = 1,
        drafts: Drafts = OFF,
        ngrams: Ngrams | None = None,
        warp_size: int = 32,
        progress: weights.Progress = lambda nbytes: None,
        packed: PackedCache | None = None,
    ) -> None:
        """Compiles the kernel for the model's shape, and packs this rank's weights. Collective.

        Args:
            checkpoint: The model. The caller may close it afterwards.
            comm: The communicator whose ranks share the lanes. It must outlive this object.
            tuning: How the device is used. Must be the same on all ranks.
            context: The positions that a slot of the KV cache has room for.
            slots: The number of sequences that the KV cache keeps, each in a slot.
            drafts: What requests will ask for. Only checked here: it must fit.
            ngrams: A table from which drafts come, the same on all ranks.
            warp_size: The threads of a warp of the simulated device.
            progress: Called with the number of bytes that were packed since the last call.
            packed: The folder that keeps packed weights; None: they are not kept.

        Raises:
            InvalidArgument: The monokernel cannot run the model on so many ranks, or such drafts.
            BackendError: There is no memory, no compiler, or the driver refused.
        """
        self.program = Program(checkpoint.config, checkpoint.formats)
        self.context = context
        self.num_slots = slots
        self._comm = comm
        self._tuning = tuning
        self._dtype = self.program.range_dtype()
        check(self.program, comm.world_size, tuning)
        self._launcher = Launcher(comm, warp_size)
        device = self._launcher.device
        self.device = "" if device is None else device.name
        self._arena: Arena = SimArena(comm) if device is None else GpuArena(comm, device)
        self._variant = USUAL  # the kernel's variant for all requests until the next use()
        self._kernels = Kernels(self.program, comm, self._launcher, self._arena, tuning, context)
        self._columns = self._kernels.columns_for(drafts)
        self._grids = Grids(self._launcher, comm, tuning, self._kernels.usual)
        self._passes = 0  # the number of passes that all earlier prefills ran
        self.drafts = OFF
        self._is_running = self._makes_tokens = self._is_closed = False
        self._work = Work()
        self.nbytes = self._kernels.usual.sizes.weights
        model, grids = (checkpoint, self.program, comm), self._grids
        kept = None if packed is None else keeping.Kept(packed, *model, tuning, self._arena, grids)
        self._loaded = loading.load(
            *(*model, self._arena, self._kernels.usual.sizes, context, grids.pack, progress),
            *(slots, max(self._columns, tuning.seats), None if device is None else grids),
            kept,
        )
        self._task, self._mailbox = self._loaded.task, self._loaded.mailbox
        self._ngrams = structs.table_at(self._arena, ngrams) if self._columns > 1 else None
        self.rotations = self._loaded.rotations
        self._outputs = Outputs(
            *(self.program, self._loaded.norms),
            *(self.program.lanes_of(comm.rank, comm.world_size), self.rotations),
            self._kernels.usual.sizes.slots,
            tuning.kv_splits,
            lambda at, nbytes: self._arena.read(
                self._task.exchange_buffers[comm.rank] + at, nbytes
            ),
        )
        # Kernels are loaded now: a GPU may load none while a running kernel waits for a rank.
        self._load(self._kernels.usual)
        # After the first meet() all exchange buffers exist. The second shows that the first
        # succeeded everywhere: then waits have the usual timeout instead of that of the first call.
        self._launcher.meet()
        self._launcher.meet()

    # ---- loading kernels -------------------------------------------------------------------------

    def _load(self, decoder: Compiled) -> None:
        """Launches kernels once, because a kernel's first launch loads it onto the GPU. These
        launches read no weights and wait for no rank.
        """
        if self._launcher.device is not None:
            self._begin()
            self._set_ids([0])
            self._decoder = decoder
            self._task.only_reads, self._task.num_ids = 1, 0
            if decoder is self._kernels.usual:
                self._copy_beginning(Place(0, self.num_slots - 1))
                self._grids.load_prefill(self._task)
            self._grids.decode(self._decoder, self._task)
            self.wait()

    # ---- requests --------------------------------------------------------------------------------

    def prepare(self, params: SamplingParams, *, overlaps: bool = True) -> None:
        """See Executor."""
        check_sampling(params)
        for form in self._forms(params, self._drafts_of(params, overlaps), overlaps):
            if not self._kernels.has(self._variant, **form):
                self._load(self._kernels.get(self._variant, **form))

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        place: Place = BEGINNING,
        overlaps: bool = True,
    ) -> None:
        """See Executor."""
        check_ids(ids, self.context, room=1)
        check_sampling(params)
        drafts = self._drafts_of(params, overlaps)
        self._begin(makes_tokens=True)
        self._set_ids(ids, place)
        self._task.max_tokens = params.max_tokens
        decoders = self._decoders(params, drafts, overlaps)
        prefill = self._split_off_prefill() if overlaps else None

        def launch() -> None:
            self._copy_beginning(place)
            if prefill is not None:
                self._grids.prefill(prefill)
            leaving.run(self._launcher, self._grids, self._task, self._mailbox, decoders)

        if self._launcher.device is not None and len(decoders) == 1:
            launch()
        else:
            # In the simulator a launch returns when the kernel has ended.
            self._work.start(launch)

    def tokens(self) -> Iterator[Token]:
        """See Executor."""
        yield from answer.tokens(self._task, self._loaded, self._await, self._dtype)
        self.wait()

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """See Executor."""
        if self._is_running and not self._is_closed:
            self._loaded.choices.post_mask(position, words)

    def cancel(self) -> None:
        """See Executor."""
        # Requests without tokens cannot be cancelled. They end on all ranks after the same launch.
        if self._is_running and self._makes_tokens:
            self._mailbox.cancelled = self._task.number

    def end(self) -> None:
        """See Executor."""
        self.cancel()
        self.wait()

    def prepare_scoring(self) -> None:
        """See Executor."""
        columns = self._columns if self._variant == USUAL else 1
        if not self._kernels.has(self._variant, columns=columns):
            self._load(self._kernels.get(self._variant, columns=columns))

    def start_scoring(
        self,
        ids: Sequence[int],
        out: NDArray[np.float32],
        *,
        writes_shared: bool,
        place: Place = BEGINNING,
    ) -> None:
        """See Executor."""
        ids, start = check_ids(ids, self.context), place.num_cached
        columns = self._columns if self._variant == USUAL else 1

        def work() -> None:
            self._copy_beginning(place)
            for first in range(start, len(ids), loading.SCORED_AT_ONCE):
                some = ids[: first + loading.SCORED_AT_ONCE]
                at = place._replace(num_cached=first)
                self._run_ids(some, at, logits=self._loaded.logits, columns=columns)
                if writes_shared:
                    found = finite(self._scored(len(some) - first), self._dtype)
                    out[first - start : len(some) - start] = found

        self._begin()
        self._work.start(work)

    def start_trace(self, ids: Sequence[int], outs: Traced, *, writes_shared: bool) -> None:
        """See Executor."""
        ids = check_ids(ids, self.context)
        mine = [op for op in self.program.ops if op.shape[0] > 1 or writes_shared]

        def work() -> None:
            for position, token in enumerate(ids):
                place = BEGINNING._replace(num_cached=position)
                self._run_ids(ids[: position + 1], place, logits=self._loaded.logits)
                for op in [op for op in mine if op.index in outs]:
                    for index, values in self._output_of(op, position, token).items():
                        outs[op.index][index, position] = values

        self._begin()
        self._work.start(work)

    def _output_of(self, op: Op, position: int, token: int) -> dict[int, NDArray[np.float32]]:
        """Returns an op's output at the position that ran last, by lane or residual."""
        if op.kind != "embed":
            return {0: self._scored(1)[0]} if op.kind == "head" else self._outputs.of(op, position)
        stored_in = self.program.format_of(op.kind)
        row_bytes = stored_in.bytes_of(self.program.config.hidden)
        row = self._arena.read(self._task.embedding + row_bytes * token, row_bytes)
        return dict.fromkeys(self._outputs.residuals(), embedded(row, stored_in))

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """See Executor."""
        return out

    def start_streaming(self, turns: int) -> None:
        """See Executor."""

        def work() -> None:
            self._set_ids([0])
            self._task.max_tokens, self._task.only_reads = turns, 1
            self._grids.decode(self._decoder, self._task)
            self._launcher.wait()

        self._begin()
        self._work.start(work)

    def use(self, variant: Variant) -> None:
        """See Executor."""
        self._variant = variant
        self.prepare(SamplingParams())

    def start_timeline(
        self, ids: Sequence[int], place: Place, token_steps: int, out: list[Stamps]
    ) -> None:
        """See Executor."""
        ids = list(ids)

        def work() -> None:
            traced = self._kernels.get(self._variant)
            numbers = self._tuning.blocks, traced.sizes.stamps, token_steps
            recording = Recording(self._comm, self._launcher, self._arena, traced.module, *numbers)
            self._copy_beginning(place)
            self._set_ids(ids, place)
            self._task.max_tokens, self._task.num_stop_ids = token_steps, 0
            recording.give_to(self._task)
            self._grids.decode(self._decoder, self._task)
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

    def _begin(self, *, makes_tokens: bool = False) -> None:
        """Records that a request runs. Raises if one does already, or the executor is closed."""
        if self._is_closed:
            raise kccl.Error("the engine is closed")
        if self._is_running:
            raise kccl.Error(f"rank {self._comm.rank} still works on the request before")
        self._is_running, self._makes_tokens = True, makes_tokens

    def _set_ids(self, ids: Sequence[int], place: Place = BEGINNING) -> None:
        """Puts a request's ids into the task. The kernel runs those that are not cached."""
        task = self._task
        self._arena.write(task.ids, np.asarray(ids, np.int32))
        task.num_ids, task.start = len(ids), place.num_cached
        task.cache = self._loaded.caches[place.slot]
        structs.begin(task, self._mailbox)
        self._decoder = self._kernels.get(self._variant)

    def _drafts_of(self, params: SamplingParams, overlaps: bool) -> Drafts:
        """Returns a request's drafts: none in other variants, and where nothing overlaps."""
        drafts = self.drafts if overlaps and self._variant == USUAL else OFF
        return used_drafts(drafts, params, self._columns)

    def _forms(self, params: SamplingParams, drafts: Drafts, overlaps: bool) -> list[Any]:
        """Returns which kernels a request needs, as dicts of arguments of Kernels.get()."""
        columns = {drafts.most + 1, 1 if drafts.adapts else drafts.most + 1}
        form = {"samples": wants_sampling(params), "overlaps": overlaps}
        return [form | {"columns": each} for each in sorted(columns)]

    def _decoders(self, params: SamplingParams, drafts: Drafts, overlaps: bool) -> list[Compiled]:
        """Puts into the task how kernels choose tokens. Returns them, as for leaving.run()."""
        structs.give_drafts(self._task, self._arena, drafts, self.context, self._ngrams)
        self._loaded.choices.give_to(self._task, params)
        forms = self._forms(params, drafts, overlaps)
        return [self._kernels.get(self._variant, **each) for each in forms]

    def _run_ids(
        self, ids: Sequence[int], place: Place, *, logits: Sequence[int], columns: int = 1
    ) -> None:
        """Runs the ids that are not cached, `columns` at a time, until the kernel has ended."""
        self._set_ids(ids, place)
        self._decoder = self._kernels.get(self._variant, columns=columns)
        self._task.logits = list(logits)
        self._grids.decode(self._decoder, self._task)
        self._launcher.wait()
        self._comm.check()

    def _scored(self, num: int) -> NDArray[np.float32]:
        """Returns the logits of the last run's first `num` positions."""
        vocab_size = self.program.config.vocab_size
        data = self._arena.read(self._loaded.logits[self._comm.rank], 4 * num * vocab_size)
        return np.frombuffer(data, np.float32).reshape(num, vocab_size)

    def _split_off_prefill(self) -> Any:
        """Returns the task that prefills all ids but the last, or None if there is none."""
        prefill = structs.split_off_prefill(self._task, self._tuning, self._passes)
        # All ranks count alike: they run the same requests, and none follows a failed one.
        if prefill is not None:
            self._passes += structs.num_passes(prefill, self._tuning)
        return prefill

    def _copy_beginning(self, place: Place) -> None:
        """Copies cached keys and values to the request's slot, if they lie in another slot."""
        if place.source != place.slot:
            caches = self._loaded.caches
            self._grids.copy_cache(caches[place.slot], caches[place.source], place.num_cached)

    def _await(self, token: Any) -> Any:
        """Waits until the kernel has written `token`. Raises if the executor fails or is closed."""
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
            time.sleep(_LOOK_S if self.device else _LOOK_AT_SIMULATOR_S)
        return token
