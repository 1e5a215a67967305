"""Places what a rank's kernels need in its device's memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import ffi
from ..files.checkpoint import Checkpoint
from ..files.vectors import norms_of
from ..model.program import Program
from ..model.rotations import Rotations
from . import weights
from .memory import Arena
from .outputs import Places
from .task import MAILBOX_BYTES, TOKEN_BYTES, layers, mailbox_at, new_task, tokens_at

MOST_STOP_IDS = 64
# Positions whose logits a launch writes at most.
SCORED_AT_ONCE = 64


class Sizes(NamedTuple):
    """What the kernel tells of a shape, in bytes: KcclDecodeSizes.

    Attributes:
        shared: Of a block's shared memory.
        board: Of a rank's board.
        weights: Packed.
        cache: Of keys and values.
        places: On the board.
        prefill_shared: Of a block's shared memory in prefill; 0 without chunks.
        stamps: Of a round and block, if the kernel traces; a number, not bytes.
    """

    shared: int
    board: int
    weights: int
    cache: int
    places: Places
    prefill_shared: int
    stamps: int


class Loaded(NamedTuple):
    """A rank's memory.

    Attributes:
        task: KcclDecodeTask: what it tells the kernel.
        norms: See norms_of(). The kernel has a copy.
        rotations: What it rotates by, of which the kernel has a copy.
        tokens, mailbox: KcclDecodeToken [context] and KcclDecodeMailbox, in host memory that the
            kernel reads and writes.
        logits: Addresses of every rank's logits, of SCORED_AT_ONCE positions.
        marks: Address of the marks of ids that a penalty asks for.
    """

    task: Any
    norms: dict[str, NDArray[np.float32]]
    rotations: Rotations
    tokens: Any
    mailbox: Any
    logits: list[int]
    marks: int


def sizes_of(data: bytes) -> Sizes:
    """What the kernel `describe` has written."""
    told = ffi.from_buffer("KcclDecodeSizes *", data)
    places = Places(*(getattr(told, name) for name in Places._fields))
    fields = {name: getattr(told, name) for name in Sizes._fields if name != "places"}
    return Sizes(places=places, **fields)


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
) -> Loaded:
    """Packs a rank's weights and allocates its memory. Collective.

    Args:
        checkpoint: The model.
        program: Its program.
        comm: The ranks.
        arena: Where the memory comes from.
        sizes: Of this shape.
        context: Positions to make room for.
        pack: Packs a matrix: (packed weights, matrix, product, layer, group). Returns when the
            matrix has been read.
        progress: Called with the number of bytes that were packed since the last call.
    """
    c, world_size = program.config, comm.world_size
    lanes = program.lanes_of(comm.rank, world_size)
    # Ranks allocate together, and one with fewer lanes needs less.
    biases = weights.biases(checkpoint, program, lanes)
    needs = comm.gather_objects([sizes.weights, sizes.cache, sizes.board, biases.nbytes])
    weights_bytes, cache_bytes, board_bytes, biases_bytes = map(max, zip(*needs, strict=True))
    task = new_task()
    task.weights = arena.allocate(weights_bytes)
    staging = arena.allocate(weights.most_bytes(program, world_size))
    for product, layer, group, matrix in weights.matrices(
        checkpoint, program, lanes, comm.rank, world_size
    ):
        arena.write(staging, matrix)
        pack(task.weights, staging, product, layer, group)
        progress(matrix.nbytes)
    task.embedding = arena.place(weights.embedding(checkpoint, program))
    norms = norms_of(checkpoint, program)
    task.norms = arena.place(np.stack([norms[name] for op in program.ops for name in op.norms()]))
    of_heads = [norms[name] for op in program.ops for name in op.head_norms()]
    if of_heads:
        task.qk_norms = arena.place(np.stack(of_heads))
    if c.biases:
        task.biases = arena.allocate(biases_bytes)
        arena.write(task.biases, biases)

    def copy_rotations() -> None:
        arena.write(task.cosines, rotations.cosines)
        arena.write(task.sines, rotations.sines)

    rotations = Rotations(program, context, copy_rotations)
    task.cosines, task.sines = arena.place(rotations.cosines), arena.place(rotations.sines)
    task.cache = arena.allocate(cache_bytes)
    task.layers = arena.place(np.frombuffer(layers(program), np.uint8))
    for each, address in enumerate(arena.shared(board_bytes)):
        task.boards[each] = address
    logits = arena.shared(4 * SCORED_AT_ONCE * c.vocab_size)
    task.ids = arena.allocate(4 * context)
    task.stop_ids = arena.allocate(4 * MOST_STOP_IDS)
    own_logits_bytes = 4 * weights.head_rows(program, world_size)
    task.own_logits = arena.allocate(own_logits_bytes)
    marks = arena.allocate(own_logits_bytes)
    task.tokens = arena.on_host(TOKEN_BYTES * context)
    task.mailbox = arena.on_host(MAILBOX_BYTES)
    return Loaded(
        task,
        norms,
        rotations,
        tokens_at(task.tokens, context),
        mailbox_at(task.mailbox),
        logits,
        marks,
    )
