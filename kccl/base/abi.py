"""Loads the compiled core: its functions, and the constants and structs of abi.inc by name."""

import re
import zlib
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from .. import _core as core
except ImportError as error:
    from . import extras

    raise ImportError(
        f"the compiled core of kccl is not in {Path(__file__).parents[1]} ({error}). "
        f"Build it with: {extras.reinstall()}"
    ) from error

ffi: Any = core.ffi
lib: Any = core.lib


def _load_fastcall() -> Any:
    # One shared library holds both modules. An ordinary import finds only the first, _core.
    loader = ExtensionFileLoader("kccl._fastcall", core.__file__)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from .. import _fastcall

    fastcall = _fastcall
else:
    fastcall = _load_fastcall()


def _snake_case(camel: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", camel).lower()


def members(enum: str, prefix: str = "kKccl") -> dict[str, int]:
    """Returns the members of a C enum: {name in snake case: value}, sorted by value.

    The prefix is cut off. The closing `Num...` entry is left out.
    """
    elements: dict[int, str] = ffi.typeof(f"enum {enum}").elements
    names = [(_snake_case(name.removeprefix(prefix)), value) for value, name in elements.items()]
    names.sort(key=lambda pair: pair[1])
    if names[-1][0].startswith("num_"):
        names.pop()
    return dict(names)


MAX_WORLD_SIZE: int = lib.kKcclMaxWorldSize
MAX_BLOCKS: int = lib.kKcclMaxBlocks
GRID_COUNTER_LINES: int = lib.kKcclGridCounterLines
NUM_SIGNALS: int = lib.kKcclNumSignals
NUM_SENTINEL_SLOTS: int = lib.kKcclNumSentinelSlots
NUM_EXCHANGE_SLOTS: int = lib.kKcclNumExchangeSlots
LINE_BYTES: int = lib.kKcclLineBytes
MOST_PIPES: int = lib.kKcclMostPipes
FEW_PIPES: int = lib.kKcclFewPipes
PIPE_SLICE_BYTES: int = lib.kKcclPipeSliceBytes
_TAG_SHIFT: int = lib.kKcclTagShift
_ANY_TAG: int = lib.kKcclAnyTag
MOST_GPU_TAG = _ANY_TAG - 1
"""The largest tag of a message between GPUs, or on the simulator."""
PACKET_UNIT: int = lib.kKcclPacketUnit
LEAST_STAGING_BYTES: int = lib.kKcclLeastStagingBytes
GPU_POLLS_PER_CHECK: int = lib.kKcclGpuPollsPerCheck
NUM_FLAGS: int = lib.kKcclNumFlags
POSTING_BYTES: int = lib.kccl_host_posting_bytes()
ABI_VERSION: int = lib.kKcclAbiVersion
KERNELS = members("KcclKernel")
DTYPES = members("KcclDtype")
OPS = members("KcclOp")
ARGUMENTS = members("KcclArgument", "kKcclArgument")
NODES_CALLS = members("KcclNodesCall", "kKcclNodes")
EXPERT_CALLS: dict[str, int] = {"dispatch": lib.kKcclDispatch, "combine": lib.kKcclCombine}
"""Calls within kernels that are not in KERNELS."""
MESSAGE_CALLS: dict[str, int] = {"send": lib.kKcclSendTo, "recv": lib.kKcclRecvFrom}
"""The two parts of a call of send_recv that can wait. KERNELS has these names too, for kernels on
CPUs.
"""


# KcclCall.dtype has numbers for types that the library only moves: the first of these numbers, and
# how many there are.
_MOVED_FROM, _MOVED_NUMBERS = 32, 224


def moved_type(name: str) -> int:
    """Returns the number by which ranks compare the element types of calls that only move data.

    A type that the library can reduce has its number in KcclDtype. Another type has a check sum of
    its name.
    """
    known = DTYPES.get(name)
    return _MOVED_FROM + zlib.crc32(name.encode()) % _MOVED_NUMBERS if known is None else known


def message_head(nbytes: int, tag: int) -> int:
    """Returns a message's length and tag in the form of KcclCall.sends; `tag` is -1 for any tag."""
    return nbytes | (tag & _ANY_TAG) << _TAG_SHIFT


def message_bytes(head: int) -> int:
    """Returns a message's length from what message_head() returned."""
    return head & ((1 << _TAG_SHIFT) - 1)


def type_words(number: int) -> str:
    """Returns the element type with this number in KcclCall.dtype in words; "" if there is none."""
    if number >= _MOVED_FROM:
        return f"a type that KCCL only moves (check sum {number - _MOVED_FROM})"
    return next((name for name, each in DTYPES.items() if each == number), "")


def kernel_name(kernel: int) -> str:
    """Returns the name of a KcclKernel number. It is a kernel (the name is also its file's), a call
    for experts, or a send or receive.
    """
    calls = (KERNELS, EXPERT_CALLS, MESSAGE_CALLS)
    return next(name for each in calls for name, value in each.items() if value == kernel)
