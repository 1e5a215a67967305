"""Copies what a rank's kernels need into its device's memory."""

import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.ahead import ahead
from ..base.core import ffi
from ..files.checkpoint import Checkpoint
from ..files.vectors import norms_of
from ..formats.nested import Nested
from ..model.ops import KINDS, products_in
from ..model.program import Program
from ..model.rotations import Rotations
from . import layout, weights
from .choices import Choices
from .keeping import Kept
from .made import BLOCKS_BYTES, DrawnProduct, Maker, NestedProduct, PairedProduct
from .memory import Arena
from .outputs import Slots
from .task import MAILBOX_BYTES, TOKEN_BYTES, layers, mailbox_at, new_task, tokens_at

# The largest number of positions whose logits one launch writes.
SCORED_AT_ONCE = 64
# The most threads of a rank that read matrices ahead, and the most bytes of these.
_MOST_READERS, _MOST_AHEAD = 12, 512 << 20


class Sizes(NamedTuple):
    """The sizes that the kernel reports for a shape (KcclDecodeSizes), in bytes unless said
    otherwise.

    Attributes:
        shared: The size of a block's shared memory.
        exchange_buffer: The size of a rank's exchange buffer.
        weights: The size of a rank's packed weights.
        cache: The size of a slot of a rank's KV cache.
        slots: Where each kind of vectors begins in the exchange buffer, in float4s.
        prefill_shared: The size of a block's shared memory in prefill. 0 if there is no kernel for
            chunks.
        most_columns: For how many columns a block has enough shared memory.
        stamps: The number of stamps of a block in a token step, if the kernel traces.
    """

    shared: int
    exchange_buffer: int
    weights: int
    cache: int
    slots: Slots
    prefill_shared: int
    most_columns: int
    stamps: int


class Loaded(NamedTuple):
    """A rank's memory on its device, and what the host needs to use it.

    Attributes:
        task: A KcclDecodeTask with the addresses of the rank's memory.
        norms: The norms, as norms_of() returns them, and the rank's attention sinks. Kernels read a
            copy.
        rotations: The tables of cosines and sines. Kernels read a copy.
        tokens, mailbox: KcclDecodeToken [context] and KcclDecodeMailbox, in host memory that the
            kernel reads and writes.
        logits: The addresses of every rank's logits, with room for SCORED_AT_ONCE positions.
        choices: Prepares the choice of a request's tokens.
        caches: The address of each slot of the KV cache.
    """

    task: Any
    norms: dict[str, NDArray[np.float32]]
    rotations: Rotations
    tokens: Any
    mailbox: Any
    logits: list[int]
    choices: Choices
    caches: list[int]


def sizes_of(data: bytes) -> Sizes:
    """Reads the sizes that the kernel `describe` has written."""
    told = ffi.from_buffer("KcclDecodeSizes *", data)
    slots = Slots(*(getattr(told, name) for name in Slots._fields))
    fields = {name: getattr(told, name) for name in Sizes._fields if name != "slots"}
    return Sizes(slots=slots, **fields)


SIZES_BYTES: int = ffi.sizeof("KcclDecodeSizes")


def load(
    checkpoint: Checkpoint,
    program: Program,
    comm: kccl.Communicator,
    arena: Arena,
    sizes: Sizes,
    context: int,
    pack: Callable[[int, int, int, int, int], None],
    progress: weights.Progress,
    slots: int = 1,
    columns: int = 1,
    maker: Maker | None = None,
    kept: Kept | None = None,
) -> Loaded:
    """Packs a rank's weights and allocates its memory. Collective.

    Args:
        checkpoint: The model.
        program: The model's program.
        comm: The communicator of all ranks.
        arena: Allocates the memory.
        sizes: The sizes that the kernel reports.
        context: The positions that a slot of the KV cache has room for.
        pack: Packs a matrix: (address of the packed weights, address of the matrix, number of the
            product, layer, lane group). A lane group is the blocks that share a residual
            (kernels/shape.cuh). Must return only when the kernel has read the matrix.
        progress: Called with the number of bytes that were packed since its last call.
        slots: The number of sequences that the KV cache keeps.
        columns: The most positions that a token step runs.
        maker: Makes products on the device. None: the device makes none.
        kept: The file that keeps packed weights. None: they are not kept.
    """
    c, world_size = program.config, comm.world_size
    lanes = program.lanes_of(comm.rank, world_size)
    # Allocation is collective, and all ranks must ask for the same number of bytes. A rank with
    # fewer lanes needs less, so all take the largest number.
    biases = weights.biases(checkpoint, program, lanes)
    needs = comm.gather_objects([sizes.weights, sizes.cache, sizes.exchange_buffer, biases.nbytes])
    weights_bytes, cache_bytes, exchange_buffer_bytes, biases_bytes = map(
        max, zip(*needs, strict=True)
    )
    task = new_task()
    # The large allocations come before the weights are read, which takes longest. So they fail
    # early.
    with closing(kept) if kept is not None else nullcontext():
        try:
            task.cache = arena.allocate(slots * cache_bytes)
        except kccl.BackendError as error:
            raise kccl.BackendError(
                f"{error}; {slots} times {cache_bytes} bytes are for keys and values: use a "
                "smaller context, or fewer prefixes"
            ) from error
        task.weights = arena.allocate(weights_bytes)
        writer = _Writer(program, comm.world_size, arena, maker)
        _fill(checkpoint, program, comm, arena, task.weights, pack, progress, writer, kept)
    row_bytes = program.format_of("embed").bytes_of(c.hidden)
    task.embedding = arena.allocate(c.vocab_size * row_bytes)
    writer.write(task.embedding, weights.embedding(checkpoint, program, makes=writer.makes))
    norms = norms_of(checkpoint, program)
    # The experts' products multiply the vector that the router has had.
    with_norms = [op for op in program.ops if not KINDS[op.kind].has_experts]
    task.norms = arena.place(np.stack([norms[name] for op in with_norms for name in op.norms()]))
    of_heads = [norms[name] for op in program.ops for name in op.head_norms()]
    if of_heads:
        task.qk_norms = arena.place(np.stack(of_heads))
    if c.biases:
        task.biases = arena.allocate(biases_bytes)
        arena.write(task.biases, biases)
    if sinks := weights.sinks(checkpoint, program, lanes):
        of_layers = np.stack([*sinks.values()])
        task.sinks = arena.allocate(max(comm.gather_objects(of_layers.nbytes)))
        arena.write(task.sinks, of_layers)
        norms |= sinks

    def copy_rotations() -> None:
        arena.write(task.cosines, rotations.cosines)
        arena.write(task.sines, rotations.sines)

    rotations = Rotations(program, context, copy_rotations)
    task.cosines, task.sines = arena.place(rotations.cosines), arena.place(rotations.sines)
    task.layers = arena.place(np.frombuffer(layers(program), np.uint8))
    for each, address in enumerate(arena.shared(exchange_buffer_bytes)):
        task.exchange_buffers[each] = address
    logits = arena.shared(4 * SCORED_AT_ONCE * c.vocab_size)
    # Behind the ids there is room for those that drafts predict.
    task.ids = arena.allocate((8 if columns > 1 else 4) * context)
    task.mailbox = arena.on_host(MAILBOX_BYTES)
    mailbox = mailbox_at(task.mailbox)
    choices = Choices(task, mailbox, program, comm, arena, context, columns)
    task.tokens = arena.on_host(TOKEN_BYTES * context)
    return Loaded(
        task,
        norms,
        rotations,
        tokens_at(task.tokens, context),
        mailbox,
        logits,
        choices,
        [task.cache + slot * cache_bytes for slot in range(slots)],
    )


class _Writer:
    """Brings matrices into a rank's memory in their stored format. Its device makes some of them.

    Attributes:
        makes: Whether the device makes any.
    """

    def __init__(
        self, program: Program, world_size: int, arena: Arena, maker: Maker | None
    ) -> None:
        """Allocates memory for what the device makes matrices of. Collective."""
        self._arena, self._maker, self.makes = arena, maker, maker is not None
        # A block has as many bytes in both layouts of MXFP4.
        most = layout.most_bytes(program, world_size, of_experts=True)
        kinds = ("embed", *products_in(program.config))
        if self.makes and any(isinstance(program.format_of(kind), Nested) for kind in kinds):
            most = max(most, BLOCKS_BYTES)
        self._from = arena.allocate(most) if most else 0

    def write(self, to: int, matrix: weights.Matrix) -> None:
        """Writes a matrix to an address. The kernel that packs it may be launched then."""
        if isinstance(matrix, np.ndarray):
            return self._arena.write(to, matrix)
        assert self._maker is not None
        match matrix:
            case DrawnProduct():
                self._maker.draw(to, matrix)
            case PairedProduct():
                self._arena.write(self._from, matrix.pairs)
                self._arena.write(self._from + matrix.pairs.nbytes, matrix.scales)
                self._maker.pair(to, self._from, matrix)
            case NestedProduct():
                for part in matrix.parts:
                    self._arena.write(self._from, part.blocks)
                    self._maker.nest(to, self._from, matrix.format, part)


def _fill(
    checkpoint: Checkpoint,
    program: Program,
    comm: kccl.Communicator,
    arena: Arena,
    to: int,
    pack: Callable[[int, int, int, int, int], None],
    progress: weights.Progress,
    writer: _Writer,
    kept: Kept | None,
) -> None:
    """Fills the memory at address `to` with a rank's packed weights: with those that are kept, then
    with the others, which it packs and keeps. The other arguments are those of load(). Collective.
    """
    staging = arena.allocate(layout.most_bytes(program, comm.world_size))
    pieces = layout.pieces(program, comm.rank, comm.world_size)
    of_layers = {layer: [*some] for layer, some in groupby(pieces, attrgetter("layer"))}
    for layer in kept.load(to) if kept is not None else ():
        progress(sum(piece.product.nbytes for piece in of_layers.pop(layer)))
    left = [piece for some in of_layers.values() for piece in some]
    calls = weights.matrices(checkpoint, program, left, makes=writer.makes)
    threads = max(1, min(_MOST_READERS, len(os.sched_getaffinity(0)) // comm.world_size))
    with closing(ahead(calls, threads, _MOST_AHEAD)) as matrices:
        for piece in left:
            matrix = next(matrices)
            writer.write(staging, matrix)
            # The threads may read another one into its memory while this one is packed.
            del matrix
            pack(to, staging, piece.number, piece.layer, piece.group)
            if kept is not None and piece is of_layers[piece.layer][-1]:
                kept.store(piece.layer, to)
            progress(piece.product.nbytes)
    if kept is not None:
        kept.finish()
