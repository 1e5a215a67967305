"""A failed call is told in the same words by csrc/include/kccl/record.hpp and kccl/base/failure.py.

What differs is how a program goes on: a C++ program has neither reset() nor shrink().
"""

import shutil
import subprocess
from itertools import product

import pytest
from compilers import CXX
from long import long_after

import kccl
from kccl.base import abi, failure
from kccl.base.abi import ffi, lib

PROGRAM = """
#include <kccl/record.hpp>

#include <cstdio>
#include <iostream>

int main() {
    KcclRecord record = {};
    int reader = 0;
    while (std::cin >> record.status >> record.rank >> record.peer >> record.kernel >>
           record.channel >> record.seen >> record.wanted >> record.call >> record.waited_ns >>
           reader) {
        std::puts(kccl::host::sentence(record, reader).c_str());
    }
}
"""
FIELDS = ("status", "rank", "peer", "kernel", "channel", "seen", "wanted", "call", "waited_ns")
# Calls of bfloat16 by max: an all_reduce; a reduce to rank 2; a scan, which is exclusive. A receive
# with tag 4.
CALLS = tuple(
    abi.KERNELS[kernel] << 24 | 3 << 16 | 3 << 8 | peer
    for kernel, peer in (
        ("all_reduce_one_shot_pull_simple", 0),
        ("reduce_direct_ll16", 2),
        ("scan_pull_simple", 1),
    )
)
CALLS += (abi.KERNELS["recv"] << 24 | 4,)
# At the peer an all_gather of float32, a broadcast from rank 1 of a type that is only moved, a
# barrier, a receive with any tag, or a call that is not known.
OF_PEERS = (
    abi.KERNELS["all_gather_pull_simple"] << 24,
    abi.KERNELS["broadcast_direct_ll16"] << 24 | 200 << 16 | 1,
    abi.KERNELS["barrier_direct"] << 24,
    abi.KERNELS["recv"] << 24 | lib.kKcclAnyTag,
    255 << 24,
)
KERNELS = (*abi.KERNELS.values(), *abi.EXPERT_CALLS.values(), lib.kKcclNumKernels)
# Those that a record can have. The host sets the others itself: forked and closed.
STATUSES = [
    value
    for value in abi.members("KcclStatus").values()
    if value not in (lib.kKcclOk, lib.kKcclForked, lib.kKcclClosed)
]
# What Python says -> what a C++ program is told instead.
IN_CPP = {
    "may go on after comm.reset()": "may go on with a new Communicator",
    "may go on with comm.shrink()": "may go on with a Team of their own",
    "ended its program, or it called shrink()": "ended its communicator",
    "its device_comm()": "its Options",
}
COMPILERS = [*CXX, *(["nvcc"] if shutil.which("nvcc") else [])]


def of_python(fields, reader):
    record = ffi.new("KcclRecord *", dict(zip(FIELDS, fields, strict=True)))
    text = str(failure.error_of(record.status, record, reader))
    for python, cpp in IN_CPP.items():
        text = text.replace(python, cpp)
    return text


@pytest.fixture(scope="module", params=long_after(1, COMPILERS or [None]))
def of_cpp(request, tmp_path_factory):
    """A function: [(fields, reader)] -> the sentences of record.hpp."""
    if request.param is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("record")
    (folder / "told.cpp").write_text(PROGRAM)
    flags = [] if request.param == "nvcc" else ["-Wall", "-Wextra", "-Werror"]
    command = [request.param, "-std=c++20", *flags, f"-I{kccl.include_dir()}"]
    subprocess.run([*command, folder / "told.cpp", "-o", folder / "told"], check=True)

    def tell(cases):
        lines = "".join(f"{' '.join(map(str, (*fields, reader)))}\n" for fields, reader in cases)
        done = subprocess.run([folder / "told"], input=lines, text=True, capture_output=True)
        assert done.returncode == 0
        return done.stdout.splitlines()

    return tell


@pytest.mark.long
def test_both_say_the_same_of_every_kernel_and_status(of_cpp):
    # The times are short, long, and rounded.
    times = (0, 1_234_567, 5 * 10**8, 2_999_600_000_000)
    cases = [
        ((status, 1, peer, kernel, 3, 4_000_000_000, 6, call, waited_ns), reader)
        for status, kernel, peer, reader, waited_ns, call in product(
            STATUSES, KERNELS, (-1, 0, 2), (0, 1), times + OF_PEERS, CALLS
        )
        if call == CALLS[0] or status == lib.kKcclCallsDiffer
        if (waited_ns in OF_PEERS) == (status == lib.kKcclCallsDiffer)
        # Only `wait` waits for any peer.
        if peer >= 0 or kernel == lib.kKcclWait
    ]
    assert of_cpp(cases) == [of_python(*case) for case in cases]


def test_the_numbers_mean_what_the_kernel_counts(of_cpp):
    def told(status, kernel, peer=1):
        (sentence,) = of_cpp([((status, 0, peer, kernel, 3, 4, 6, 0, 5 * 10**8), 0)])
        return sentence

    on_time_out = {
        lib.kKcclWait: "wait on signal_id 3: peer 1 did not arrive; rank 0 waited for peer 1: "
        "4 signals seen, 6 wanted, after 0.5 s",
        lib.kKcclNumKernels: "a ring of copies on rank 0: a warp of the same block did not arrive; "
        "rank 0 waited for a warp of the same block: copy 4 seen, 6 wanted, after 0.5 s",
        lib.kKcclGridSync: "grid_sync on rank 0: block 3 did not arrive; rank 0 waited for "
        "block 3: epoch seen 4, wanted 6, after 0.5 s",
        lib.kKcclBarrierDirect: "barrier_direct on channel 3: peer 1 did not arrive; rank 0 waited "
        "for peer 1: epoch seen 4, wanted 6, after 0.5 s",
    }
    for kernel, sentence in on_time_out.items():
        cure = "; all ranks may go on with a new Communicator"
        assert told(lib.kKcclTimeout, kernel) == sentence + cure
    lost = told(lib.kKcclPeerLost, lib.kKcclBarrierDirect)
    assert lost.endswith("; the survivors may go on with a Team of their own")


def test_an_argument_is_named_with_its_limit(of_cpp):
    """Also numbers of 64 bits, and negative ones."""
    values = [0, 3, 64, 2**40, *(2**64 - n for n in (1, 2, 2**40))]
    limits = [(0, 0), (64, 0), (7, 5)]
    cases = [
        ((lib.kKcclBadArgument, 1, 1, kernel, 3, low, high, argument, value), 1)
        for argument, kernel, (low, high), value in product(
            abi.ARGUMENTS.values(), KERNELS, limits, values
        )
    ]
    assert of_cpp(cases) == [of_python(*case) for case in cases]
    case = (lib.kKcclBadArgument, 1, 1, lib.kKcclSignal, 0, 64, 0, lib.kKcclArgumentSignalId, 64)
    assert of_cpp([(case, 0)]) == [
        "signal: signal_id is 64, must be below 64, in a call in the kernel on rank 1; all ranks "
        "may go on with a new Communicator"
    ]
