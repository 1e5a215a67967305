"""Opens a model's ranks on a backend: makes an executor for each rank."""

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kccl

from ..base.core import lib
from ..files.checkpoint import Checkpoint
from ..files.ngrams import ngrams_file, read_ngrams
from ..files.packed_cache import PackedCache
from ..formats.table import DTYPES, MULTIPLIED, ON_HOST, ROUNDED
from ..model.batches import MOST_REQUESTS
from ..model.drafts import OFF, Drafts, drafts_of
from ..model.executor import Executor
from ..model.ngrams import Ngrams
from ..model.ops import KINDS, Place, products_in
from ..model.program import Program
from ..monokernel.layout import packed_bytes, total_bytes
from ..monokernel.limits import check, check_requests, most_drafts
from ..monokernel.machine import machine_of, simulated_machine
from ..monokernel.tuning import tuning_for
from .device import DeviceExecutor
from .device_batch import BatchedDevice
from .host import HostExecutor
from .host_requests import DTYPE as HOST_DTYPE
from .memory import check_memory
from .packing import Parts, Sizes
from .placement import place
from .prefixes import MOST_SLOTS
from .ranks import Ranks, check_same, ranks_of_job, ranks_of_threads

Told = Callable[[int], None]
"""A function that is called with the number of bytes packed since its last call."""


class Backend(NamedTuple):
    """How a backend makes its ranks.

    Attributes:
        bytes_of: Returns the bytes of weights that a rank packs, as progress counts them: (program,
            rank, world size).
        dtypes: The dtypes to which weights may be converted.
        keeps: The names of the formats that the backend multiplies as they are stored or, for
            GGUF's blocks, in forms of formats/nested.py. They are kept unless the caller asks for a
            dtype.
        rounds: The values of Engine's argument `weights` that the backend supports.
        make: Makes a rank's executor: (checkpoint, comm, blocks, the most requests at a time,
            settings). The settings are arguments of an executor. Collective.
        held: Returns the bytes of packed weights that a rank keeps in host memory, for
            check_memory(): (program, rank, world size). None: they lie on a GPU, whose driver
            refuses allocations that do not fit before weights are read.
        takes_drafts: Whether a pass can check drafts.
        takes_drafters: Whether a function in Python can make them.
        takes_batches: Whether several requests can run at the same time.
        takes_drafts_in_batches: Whether they can have drafts then.
        has_layers_alike: Whether a kind of op must have the same format in all layers.
        has_products_alike: Whether all products of the layers except those of experts must have one
            format, if a format of them has scales.
    """

    bytes_of: Callable[[Program, int, int], int]
    dtypes: Collection[str]
    keeps: Collection[str]
    rounds: Collection[str]
    make: Callable[[Checkpoint, kccl.Communicator, int | None, int, dict[str, Any]], Executor]
    held: Callable[[Program, int, int], int] | None
    takes_drafts: bool = False
    takes_drafters: bool = False
    takes_batches: bool = False
    takes_drafts_in_batches: bool = False
    has_layers_alike: bool = False
    has_products_alike: bool = False


def rounding(checkpoint: Checkpoint) -> list[str]:
    """Returns notices for the user: those of the files, and those for weights that are not used as
    they are stored.
    """
    notices = [*checkpoint.notices, *checkpoint.fewer_bits]
    if checkpoint.rounded:
        stored = ", ".join(checkpoint.rounded)
        notices.append(f"weights are rounded from {stored} to {checkpoint.dtype}")
    notices += checkpoint.expanded
    return notices


def _host_bytes(program: Program, rank: int, world_size: int) -> int:
    return Sizes(program, Parts(program, world_size), rank).total


def _make_host(
    checkpoint: Checkpoint,
    comm: kccl.Communicator,
    blocks: int | None,
    requests: int,
    settings: dict[str, Any],
) -> Executor:
    number, cpus = place(comm, blocks)
    given = {name: value for name, value in settings.items() if name != "drafts"}
    return HostExecutor(checkpoint, comm, blocks=number, cpus=cpus, **given)


def _make_device(
    checkpoint: Checkpoint,
    comm: kccl.Communicator,
    blocks: int | None,
    requests: int,
    settings: dict[str, Any],
) -> Executor:
    program = Program(checkpoint.config, checkpoint.formats)
    check(program, comm.world_size)
    tuning = tuning_for(program, comm.world_size, machine_of(comm, program), blocks)
    if requests > 1:
        check_requests(program, tuning, requests)
        tuning = replace(tuning, seats=requests)
        return BatchedDevice(checkpoint, comm, tuning=tuning, **settings)
    tuning = replace(tuning, columns=1 + most_drafts(program, tuning, settings["drafts"]))
    return DeviceExecutor(checkpoint, comm, tuning=tuning, **settings)


def _device_bytes(program: Program, rank: int, world_size: int) -> int:
    check(program, world_size)
    return total_bytes(program, rank, world_size)


def _simulated_bytes(program: Program, rank: int, world_size: int) -> int:
    """Returns the bytes of a rank's weights in the simulator. Tiles of zeros and repeated scales
    make them more than the stored ones.
    """
    tuning = tuning_for(program, world_size, simulated_machine(program, world_size))
    return packed_bytes(program, rank, world_size, tuning.warps, tuning.strip_tiles)


_ON_CUDA = Backend(
    _device_bytes,
    DTYPES,
    MULTIPLIED,
    [name for name, forms in ROUNDED.items() if all(each.tile_bytes for each in forms)],
    _make_device,
    held=None,
    takes_drafts=True,
    takes_batches=True,
    has_layers_alike=True,
)
# On AMD's GPUs a warp loads a stage of weights before it knows to which product they belong. Those
# of experts it loads later.
_ON_HIP = _ON_CUDA._replace(takes_drafts=False, takes_batches=False, has_products_alike=True)
BACKENDS = {
    "host": Backend(
        *(_host_bytes, (HOST_DTYPE,), ON_HOST, ROUNDED, _make_host, _host_bytes),
        *(True, True, True, True),
    ),
    "cuda": _ON_CUDA,
    "hip": _ON_HIP,
    "sim": _ON_CUDA._replace(held=_simulated_bytes),
}


def read_for(
    checkpoint: Checkpoint, backend: str, dtype: str | None, weights: str | None = None
) -> Checkpoint:
    """Returns the checkpoint with its weights converted for a backend.

    `dtype` is the dtype to convert to. If it is None, that is the stored dtype if the backend has
    it, else the backend's first. `weights` says to what matrices are rounded
    (Checkpoint.as_weights()). If both are None, the formats that the backend multiplies stay as
    they are stored.

    Raises:
        InvalidArgument: There is no such backend, or it does not support the dtype or `weights`.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(map(repr, BACKENDS))
        raise kccl.InvalidArgument(f"backend is {backend!r}, must be one of {names}")
    has = BACKENDS[backend].dtypes
    if dtype is not None and dtype not in has:
        names = " or ".join(map(repr, has))
        raise kccl.InvalidArgument(f"dtype is {dtype!r}, must be {names} on backend {backend!r}")
    if weights is None:
        weights = checkpoint.weights or None
    usual = checkpoint.dtype if checkpoint.dtype in has else next(iter(has))
    rounds = BACKENDS[backend].rounds
    if weights is not None:
        if isinstance(weights, str) and weights in ROUNDED and weights not in rounds:
            names = " or ".join([*map(repr, rounds), "None"])
            raise kccl.InvalidArgument(
                f"weights is {weights!r}, must be {names} on backend {backend!r}: backend 'host' "
                "multiplies others"
            )
        rounded = checkpoint.as_dtype(dtype or usual).as_weights(weights)
        if BACKENDS[backend].has_products_alike and len(found := formats_of_layers(rounded)) > 1:
            raise kccl.InvalidArgument(
                f"weights is {weights!r}, must give the layers' matrices one format on backend "
                f"{backend!r}: in this model they would have {', '.join(found)}"
            )
        return rounded
    if dtype is not None:
        return checkpoint.as_dtype(dtype)
    kept = checkpoint.as_dtype(usual).as_stored(
        BACKENDS[backend].keeps, is_alike=BACKENDS[backend].has_layers_alike
    )
    if BACKENDS[backend].has_products_alike and len(formats_of_layers(kept)) > 1:
        plain = checkpoint.as_dtype(usual).as_stored(DTYPES)
        of_experts = {kind: kept.formats[kind] for kind in KINDS if _is_of_experts(kept, kind)}
        return plain.with_formats(plain.formats | of_experts)
    return kept


def _is_of_experts(checkpoint: Checkpoint, kind: str) -> bool:
    return checkpoint.config.experts is not None and KINDS[kind].has_experts


def formats_of_layers(checkpoint: Checkpoint) -> list[str]:
    """Returns the names of the formats that products of the layers have. Those of 16 bits count as
    one. Experts do not count: their weights are loaded when they are chosen.
    """
    kinds = (
        kind
        for kind in products_in(checkpoint.config)
        if KINDS[kind].place is Place.LAYER and not _is_of_experts(checkpoint, kind)
    )
    found = {checkpoint.formats[kind] for kind in kinds}
    names = {each.name if each.scale_bytes else "16 bits" for each in found}
    return sorted(names)


def drafts_for(backend: str, given: Drafts | str | int, slots: int = 1) -> Drafts:
    """Returns how requests on a backend make drafts. Returns OFF for "auto" if the backend takes no
    drafts, or none with so many slots.

    Args:
        backend: One of BACKENDS.
        given: As drafts_of() takes it.
        slots: The most requests at a time.

    Raises:
        InvalidArgument: `given` is wrong, or asks for drafts and the backend takes none.
    """
    drafts = drafts_of(given)
    if drafts.drafter is not None and not BACKENDS[backend].takes_drafters:
        raise kccl.InvalidArgument(
            f"a drafter in Python is for backend 'host', not for backend {backend!r}"
        )
    if given == "auto" and slots > 1 and not BACKENDS[backend].takes_drafts_in_batches:
        return OFF
    if BACKENDS[backend].takes_drafts or drafts.most == 0:
        return drafts
    if given != "auto":
        raise kccl.InvalidArgument(
            f"drafts is {given!r}, must be 'off' or 'auto' on backend {backend!r}, which takes none"
        )
    return OFF


def ngrams_for(
    checkpoint: Checkpoint, backend: str, given: str | Path | None, slots: int
) -> Ngrams | None:
    """Returns the table of n-grams from which drafts come: the one in the file `given`, or else the
    model's own. Returns None if it has none, or the backend takes no drafts with so many slots.

    Raises:
        InvalidArgument: A file is given, and the backend takes no drafts with so many slots.
        kccl.Error: The table cannot be read, or is that of another model.
    """
    kind = BACKENDS[backend]
    takes_drafts = kind.takes_drafts and (slots == 1 or kind.takes_drafts_in_batches)
    file = ngrams_file(checkpoint.source) if given is None else Path(given)
    if given is None and not (takes_drafts and file.is_file()):
        return None
    if not takes_drafts:
        what = f"with {slots} slots on" if kind.takes_drafts else "on"
        raise kccl.InvalidArgument(
            f"ngrams is {str(given)!r}, must be None {what} backend {backend!r}, which takes no "
            "drafts"
        )
    return read_ngrams(file, checkpoint.config.vocab_size)


def check_slots(backend: str, slots: int, drafts: Drafts) -> None:
    """Checks the number of requests that an engine answers at the same time.

    Raises:
        InvalidArgument: It is out of range, the backend answers one at a time, or the drafts come
            from a function in Python, which would hold up the other requests, or from a prediction,
            which is one request's.
    """
    if not 1 <= slots <= MOST_REQUESTS:
        raise kccl.InvalidArgument(f"slots is {slots}, must be from 1 to {MOST_REQUESTS}")
    if slots == 1:
        return
    if not BACKENDS[backend].takes_batches:
        raise kccl.InvalidArgument(
            f"slots is {slots}, must be 1 on backend {backend!r}, whose kernel answers one request "
            "at a time while others wait in the queue; backends 'host' and 'cuda' answer several"
        )
    if drafts.most and not BACKENDS[backend].takes_drafts_in_batches:
        raise kccl.InvalidArgument(
            f"slots is {slots}, must be 1 with drafts on backend {backend!r}: there a token step "
            "runs one position of each request"
        )
    if drafts.drafter is not None or drafts.prediction:
        given = "drafts of a prediction" if drafts.prediction else "a drafter in Python"
        raise kccl.InvalidArgument(f"slots is {slots}, must be 1 with {given}")


def check_ranks(ranks: int | None) -> None:
    """Raises InvalidArgument if Engine's argument `ranks`, the number of ranks that are threads of
    this process, is out of range, or if a launcher has started this process as a rank.
    """
    if ranks is None:
        return
    if not 1 <= ranks <= lib.kKcclMaxWorldSize:
        raise kccl.InvalidArgument(f"ranks is {ranks}, must be from 1 to {lib.kKcclMaxWorldSize}")
    if kccl.launched_rank() is not None:
        raise kccl.InvalidArgument(
            f"ranks is {ranks}: they are threads of one process, and a launcher has started "
            "this one as a rank of a job; leave out one of them"
        )


def start_ranks(
    checkpoint: Checkpoint,
    backend: str,
    ranks: int | None,
    blocks: int | None,
    context: int,
    prefixes: int,
    requests: int,
    drafts: Drafts,
    ngrams: Ngrams | None,
    progress: Callable[[int, int], None] | None,
    cache: PackedCache | None,
) -> Ranks[Executor]:
    """Starts a model's ranks, and returns those that are in this process. The arguments are
    Engine's; `requests` is its `slots`, the checkpoint must be from read_for(), the drafts from
    drafts_for(), and the n-grams from ngrams_for().

    Raises:
        InvalidArgument: An argument is wrong, or the backend cannot run the model.
        kccl.Error: The model cannot be read, or does not fit into memory.
    """
    kind = BACKENDS[backend]
    if not 1 <= prefixes <= MOST_SLOTS:
        raise kccl.InvalidArgument(f"prefixes is {prefixes}, must be from 1 to {MOST_SLOTS}")
    slots = max(prefixes, requests)
    packed, lock = [0], threading.Lock()

    def make(comm: kccl.Communicator) -> Executor:
        model = {"model": repr(checkpoint.config), "dtype": checkpoint.dtype}
        model["formats"] = repr([(kind, each.name) for kind, each in checkpoint.formats.items()])
        check_same(
            comm,
            model
            | {"context": context, "blocks": blocks, "prefixes": prefixes, "slots": requests}
            | {"drafts": [*drafts.of_all_ranks], "packed_cache": cache is not None}
            | {"ngrams": "" if ngrams is None else ngrams.digest},
        )
        program = Program(checkpoint.config, checkpoint.formats)
        mine = range(comm.world_size) if comm.launcher == "threads" else [comm.rank]
        sizes = [kind.bytes_of(program, rank, comm.world_size) for rank in range(comm.world_size)]
        if kind.held is not None:
            held = [kind.held(program, rank, comm.world_size) for rank in range(comm.world_size)]
            check_memory(
                comm, held, list(mine), checkpoint.config, context, slots, checkpoint.mapped_bytes
            )
        total = sum(sizes[rank] for rank in mine)

        def tell(nbytes: int) -> None:
            # Called now and then while weights are packed, which may take minutes. check() raises
            # if Ctrl-C has aborted the communicator, and so ends the packing.
            comm.check()
            with lock:
                packed[0] += nbytes
                if progress is not None:
                    progress(packed[0], total)

        settings = {"context": context, "slots": slots, "drafts": drafts, "ngrams": ngrams}
        settings |= {"progress": tell, "packed": cache}
        return kind.make(checkpoint, comm, blocks, requests, settings)

    if backend == "sim" and kccl.launched_rank() is None:
        # The simulator runs several ranks of one process in turns. A rank that launches nothing
        # would block the others.
        if ranks not in (None, 1):
            raise kccl.InvalidArgument(f"ranks is {ranks}, must be 1 on backend 'sim'")
        ranks = 1
    if ranks is None:
        return ranks_of_job(partial(kccl.init, backend=backend), make)
    return ranks_of_threads(ranks, backend, make)
