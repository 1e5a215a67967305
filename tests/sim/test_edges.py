"""Accesses outside of a kernel's memory, and what ends a kernel at once: each has its sentence, and
Python lives on.
"""

import ctypes
import faulthandler
import re
import signal
from pathlib import Path

import numpy as np
import pytest

import kccl

SOURCE = (Path(__file__).parents[1] / "kernels/edges.cuh").read_text()
NAMES = re.findall(r"KCCL_KERNEL void (\w+)\(", SOURCE)
THREAD = "rank 0 block 0 thread 0 at source:"


@pytest.fixture(scope="module")
def module():
    return kccl.compile(SOURCE, NAMES)


def launch(module, kernel, *args, world_size=1, model="sm_90", **shape):
    """Launches a kernel on every rank; callables among the arguments make them from the rank."""

    def main(comm):
        given = [each(comm) if callable(each) else each for each in args]
        module.kernel(kernel)(comm, *given, **shape)
        return given

    return kccl.run_threads(main, world_size, backend="sim", model=model)


def found(module, kernel, *args, **more):
    """The kind and the sentence of the finding, without the number of the line."""
    with pytest.raises(kccl.ProtocolError) as error:
        launch(module, kernel, *args, **more)
    sentence = str(error.value).partition("; step")[0]
    return error.value.kind, re.sub(r"source:\d+", "source:", sentence)


def floats(count=16):
    return np.zeros(count, np.float32)


# ---- Arrays and windows ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "at", "words"),
    [
        ("write_1", 64, "plainly writes 1 byte at offset 64 of {}: 1 byte behind its end"),
        ("write_2", 32, "plainly writes 2 bytes at offset 64 of {}: 2 bytes behind its end"),
        ("write_4", 16, "plainly writes 4 bytes at offset 64 of {}: 4 bytes behind its end"),
        ("write_4", -1, "plainly writes 4 bytes at offset -4 of {}: 4 bytes before its beginning"),
        ("write_4", 80, "plainly writes 4 bytes at offset 320 of {}: 260 bytes behind its end"),
        ("write_8", 8, "plainly writes 8 bytes at offset 64 of {}: 8 bytes behind its end"),
        ("write_32", 2, "plainly writes 32 bytes at offset 64 of {}: 32 bytes behind its end"),
        ("read_1", 64, "plainly reads 1 byte at offset 64 of {}: 1 byte behind its end"),
        ("read_4", 16, "plainly reads 4 bytes at offset 64 of {}: 4 bytes behind its end"),
        ("read_volatile", 16, "plainly reads 4 bytes at offset 64 of {}: 4 bytes behind its end"),
        ("load", 16, "loads 4 bytes at offset 64 of {}: 4 bytes behind its end"),
        ("store", 16, "stores to 4 bytes at offset 64 of {}: 4 bytes behind its end"),
        ("add", 16, "stores to 4 bytes at offset 64 of {}: 4 bytes behind its end"),
        ("load_packet", 4, "loads 16 bytes at offset 64 of {}: 16 bytes behind its end"),
        ("fill", 65, "plainly writes 65 bytes at offset 0 of {}: 1 byte behind its end"),
    ],
)
def test_an_access_outside_of_an_array_names_the_array_and_the_offset(module, kernel, at, words):
    # 64 bytes, at a multiple of 64.
    memory = np.zeros(32, np.float32)
    first = -(memory.ctypes.data // 4) % 16
    x = memory[first : first + 16]
    whole = f"`x` (argument 0 of {kernel}), 64 bytes"
    sentence = f"out of bounds: {THREAD} {words.format(whole)}"
    assert found(module, kernel, x, at) == ("out_of_bounds", sentence)


def test_accesses_up_to_the_ends_of_an_array_are_right(module):
    x = floats()
    for kernel, at in (("write_1", 63), ("write_4", 15), ("write_8", 7), ("write_32", 1)):
        launch(module, kernel, x, at)
    launch(module, "fill", x, 64)
    launch(module, "copy", x, floats(), 64)
    assert not x.any()


@pytest.mark.parametrize("kernel", ["copy_68", "copy"])
def test_a_copy_that_is_too_long_names_what_is_too_short(module, kernel):
    more = (68,) if kernel == "copy" else ()
    longer = floats(32)
    kind, sentence = found(module, kernel, floats(), longer, *more)
    whole = f"`x` (argument 0 of {kernel}), 64 bytes"
    assert kind == "out_of_bounds"
    assert sentence.endswith(f"reads 68 bytes at offset 0 of {whole}: 4 bytes behind its end")
    kind, sentence = found(module, kernel, longer, floats(), *more)
    whole = f"`y` (argument 1 of {kernel}), 64 bytes"
    assert kind == "out_of_bounds"
    assert sentence.endswith(f"writes 68 bytes at offset 0 of {whole}: 4 bytes behind its end")


def test_a_copy_of_a_negative_number_of_bytes_is_found(module):
    kind, sentence = found(module, "copy", floats(), floats(), 2**64 - 4)
    assert kind == "out_of_bounds"
    assert "reads 18446744073709551612 bytes at offset 0 of `x` (argument 0 of copy)" in sentence


def test_an_asynchronous_copy_has_edges(module):
    kind, sentence = found(module, "copy_late", floats(), 80)
    assert kind == "out_of_bounds"
    assert "reads 80 bytes at offset 0 of `x` (argument 0 of copy_late), 64 bytes" in sentence


def test_an_access_outside_of_a_window_names_the_window(module):
    def address(comm):
        return comm.window(256).addresses[1 - comm.rank]

    kind, sentence = found(module, "write_at", address, 64, world_size=2)
    assert kind == "out_of_bounds"
    rank = int(sentence.partition(" block")[0][-1])
    whole = f"window 0 of rank {1 - rank}, 256 bytes"
    assert sentence.endswith(f"writes 4 bytes at offset 256 of {whole}: 4 bytes behind its end")


def test_an_access_to_a_window_that_has_been_closed_says_so(module):
    def main(comm):
        address = comm.window(256).addresses[0]
        module.kernel("write_at")(comm, address, 1)
        comm.context.mesh.meetings.machine.remove_window(address)
        module.kernel("write_at")(comm, address, 1)

    words = "writes 4 bytes at offset 4 of window 0 of rank 0, 256 bytes, which has been closed"
    with pytest.raises(kccl.ProtocolError, match=re.escape(words)):
        kccl.run_threads(main, 1, backend="sim")


def test_memory_of_an_earlier_launch_that_has_been_freed_is_named(module):
    def main(comm):
        kept, x, y = comm.empty((4,), kccl.int64), floats(1 << 16), floats()
        module.kernel("keep")(comm, kept, x)
        module.kernel("use")(comm, kept, y)
        del x
        module.kernel("use")(comm, kept, y)

    words = (
        "reads 4 bytes at offset 0 of `x` (argument 1 of keep), 262144 bytes, which an earlier "
        "launch got and which has been freed since"
    )
    with pytest.raises(kccl.ProtocolError, match=re.escape(words)):
        kccl.run_threads(main, 1, backend="sim")


def test_an_array_of_another_rank_is_no_window(module):
    def main(comm):
        mine = comm.empty((4,), kccl.int64)
        module.kernel("use_of_peer")(comm, comm.device_comm(), mine, floats())

    with pytest.raises(kccl.ProtocolError) as error:
        kccl.run_threads(main, 2, backend="sim")
    assert "rank 1 block 0 thread 0" in str(error.value)
    words = (
        "plainly writes 4 bytes at offset 4 of `x` (argument 2 of use_of_peer) on rank 0, 64 "
        "bytes, an array of another rank: only windows can be accessed by all ranks"
    )
    assert words in str(error.value)


# ---- Block-shared memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "at", "words"),
    [
        (
            "write_variable",
            8,
            "offset 32 of a variable of 32 bytes in the shared memory of rank 0 block 0: 4 bytes "
            "behind its end",
        ),
        (
            "write_dynamic",
            32,
            "offset 128 of the dynamic shared memory of rank 0 block 0, for which "
            "shared_bytes=128 was given: 4 bytes behind its end",
        ),
    ],
)
def test_shared_memory_has_edges(module, kernel, at, words):
    launch(module, kernel, at - 1, shared_bytes=128)
    sentence = f"out of bounds: {THREAD} plainly writes 4 bytes at {words}"
    assert found(module, kernel, at, shared_bytes=128) == ("out_of_bounds", sentence)


def test_shared_memory_belongs_to_its_block(module):
    flag, lent = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    kind, sentence = found(module, "lend", flag, lent, grid=2)
    assert kind == "out_of_bounds"
    words = (
        "plainly writes 4 bytes at offset 4 of a variable of 32 bytes in the shared memory of "
        "rank 0 block 0, which only the threads of that block can access"
    )
    assert sentence == f"out of bounds: rank 0 block 1 thread 0 at source: {words}"


# ---- Memory that the machine does not know -----------------------------------------------------


def test_pointers_that_the_program_has_stored_may_be_used(module):
    x = floats(5000)
    launch(module, "write_at", x.ctypes.data, 4999)
    launch(module, "write_behind", np.array([0, x.ctypes.data]), 4998)
    assert x[4999] == x[4998] == 1
    y = floats()
    launch(module, "globals", y)
    assert y[0] == 2


@pytest.mark.parametrize("address", [0x123456789000, 2**63, 2**64 - 4096])
def test_memory_that_does_not_exist_is_a_finding(module, address):
    sentence = (
        f"out of bounds: {THREAD} plainly writes 4 bytes at {address:#x}, where the kernel has no "
        "memory: no array, window or shared memory that it was given is near"
    )
    assert found(module, "write_at", np.uint64(address), 0) == ("out_of_bounds", sentence)


def test_memory_that_cannot_be_accessed_is_a_finding(module):
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    no_access, private_anonymous = 0, 0x22
    address = libc.mmap(None, ctypes.c_size_t(4096), no_access, private_anonymous, -1, 0)
    try:
        kind, sentence = found(module, "write_at", address, 1)
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4096))
    assert kind == "out_of_bounds"
    assert f"memory at {address + 4:#x}, where the kernel has no memory" in sentence


def test_local_variables_belong_to_their_thread(module):
    kind, sentence = found(module, "lend_local", floats(128))
    assert kind == "out_of_bounds"
    assert sentence.endswith(
        "plainly reads 4 bytes among the local variables of another thread, or of a function that "
        "has returned: on a GPU nobody else can access them"
    )


# ---- What ends a kernel at once ----------------------------------------------------------------

STACK = (
    "needs more than the 32,768 bytes that a thread of the simulator has for local variables and "
    "calls: put large arrays into block-shared memory or into an argument, and make no deep "
    "recursion"
)


@pytest.mark.parametrize(
    ("kernel", "args", "kind", "sentence"),
    [
        ("recurse", (), "stack_overflow", f"stack overflow: {THREAD} {STACK}"),
        ("large_local", (), "stack_overflow", f"stack overflow: {THREAD} {STACK}"),
        (
            "overrun_local",
            (8,),
            "overrun_local",
            "overrun local array: rank 0 block 0 thread 0 has written beyond the end of a local "
            "array of the function that ends at source:",
        ),
        (
            "divide",
            (),
            "trap",
            f"trap: {THREAD} divides an integer by zero, whose result is undefined on a GPU",
        ),
        (
            "assert_one",
            (),
            "assertion",
            f"assertion: {THREAD}: assert(x[1] == 1) does not hold",
        ),
    ],
)
def test_what_would_end_the_process_is_a_finding(module, kernel, args, kind, sentence):
    assert found(module, kernel, np.zeros(16, np.int32), *args) == (kind, sentence)


def test_calls_that_end_the_process_are_findings(module):
    assert found(module, "give_up") == (
        "assertion",
        f"assertion: {THREAD}: the kernel calls abort()",
    )
    kind, sentence = found(module, "trap")
    assert kind == "trap"
    assert sentence.endswith("executes a trap, or an instruction that this CPU does not have")
    kind, _ = found(module, "call", 0x12345678)
    assert kind == "out_of_bounds"


def test_handlers_of_signals_are_as_before(module):
    was_enabled = faulthandler.is_enabled()
    if not was_enabled:
        faulthandler.enable()
    try:
        before = signal.getsignal(signal.SIGFPE)
        for _ in range(2):
            assert found(module, "divide", np.zeros(16, np.int32))[0] == "trap"
        assert signal.getsignal(signal.SIGFPE) == before
        assert faulthandler.is_enabled()
    finally:
        if not was_enabled:
            faulthandler.disable()
