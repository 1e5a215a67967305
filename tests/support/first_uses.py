"""First uses of everything public on GPUs, while each of them waits for a signal.

    python first_uses.py BACKEND RANKS
    kccl run -n RANKS -- python first_uses.py BACKEND

The ranks are threads, or processes. The signal is sent when all has been enqueued. So a call that
loads a kernel, where loading waits for the kernels that run, lasts until the wait's time is up.
Prints, as JSON, the names of the calls whose results are wrong, and how long kccl.init() took.
"""

import json
import sys
import time

import numpy as np
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl
from kccl.gpu import driver, library
from kccl.tools import warm as warm_command

SOURCE = """
#include <kccl/kccl.cuh>

KCCL_KERNEL void set_to(float* x, float value) {
    const auto i = kccl::platform::block_in_grid() * 64 + kccl::platform::thread_in_block();
    if (kccl::platform::thread_in_block() < 64) kccl::mem::store_plain(x + i, value);
}

KCCL_KERNEL void sum_within(kccl::DeviceComm comm, float* x, long count) {
    kccl::all_reduce<float, kccl::Sum>(kccl::block(), comm, x, x, count);
}
"""
NAMES = ["set_to", "sum_within"]
COUNT = 64
# The kernels that reduce, or compute besides: kccl.init() loads them if the cache has them.
_OF_TYPES = ("all_reduce_", "reduce_", "scan_", "scale", "narrow", "rms_norm")
_FREE = 7


def warm(world_size, arch):
    """Compiles the kernels that use_all() needs and kccl.init() does not compile, as `kccl warm`
    does.
    """
    for kernel, dtype, op, _ in warm_command.instances([world_size], ["float32"], ["sum"]):
        if kernel.startswith(_OF_TYPES):
            library.compile_kernel(kernel, dtype, op, world_size, arch)


def use_all(comm, before):
    """Makes each call for the first time; returns the names of those whose result is wrong.

    Args:
        comm: The rank's communicator, which no call has used.
        before: A module of SOURCE, which was compiled before `comm` was made.
    """
    device = driver.device(ordinal_of(comm))
    with device.current():
        side = driver.make_stream()
    size, rank = comm.world_size, comm.rank
    after, previous = (rank + 1) % size, (rank - 1) % size
    total, total_before = size * (size + 1) / 2, (rank + 1) * (rank + 2) / 2
    inside = kccl.compile(SOURCE + "// again\n", NAMES, target=comm.backend)
    device_comm, window = comm.device_comm(channels=1, max_bytes=4 * COUNT), comm.window(1024)
    counts = [COUNT] * size

    def mine(times=1):
        return to_gpu(np.full(times * COUNT, rank + 1, np.float32), device.ordinal)

    def zeros(times=1):
        return to_gpu(np.zeros(times * COUNT, np.float32), device.ordinal)

    every = np.repeat(np.arange(1, size + 1, dtype=np.float32), COUNT)
    product = kccl.premul_sum(2.0)

    def in_group(x, out):
        with comm.group():
            comm.send(x, after)
            comm.recv(out, previous)

    def moves(x, out):
        comm.put(x, after, window)
        comm.signal(after, 1)
        comm.wait(1, peer=previous)
        comm.barrier()
        comm.get(out, rank, window)

    # Name -> the input, the output, the call, and what must be in the output.
    uses = {
        "all_reduce": (mine(), zeros(), lambda x, y: comm.all_reduce(x, out=y), total),
        "premul_sum": (
            *(mine(), zeros()),
            *(lambda x, y: comm.all_reduce(x, out=y, op=product), 2 * total),
        ),
        "reduce": (
            *(mine(), zeros()),
            *(lambda x, y: comm.reduce(x, 0, out=y), total if rank == 0 else 0),
        ),
        "scan": (mine(), zeros(), lambda x, y: comm.scan(x, out=y), total_before),
        "reduce_scatter": (
            *(mine(size), zeros()),
            *(lambda x, y: comm.reduce_scatter(x, out=y), total),
        ),
        "reduce_scatter, counts": (
            *(mine(size), zeros()),
            *(lambda x, y: comm.reduce_scatter(x, out=y, counts=counts), total),
        ),
        "all_gather": (mine(), zeros(size), lambda x, y: comm.all_gather(x, out=y), every),
        "all_to_all": (mine(size), zeros(size), lambda x, y: comm.all_to_all(x, out=y), every),
        "all_to_all, counts": (
            *(mine(size), zeros(size)),
            lambda x, y: comm.all_to_all(x, out=y, send_counts=counts, recv_counts=counts),
            every,
        ),
        "gather": (
            *(mine(), zeros(size)),
            *(lambda x, y: comm.gather(x, 0, out=y), every if rank == 0 else 0),
        ),
        "scatter": (mine(size), zeros(), lambda x, y: comm.scatter(x, 0, out=y), 1),
        "broadcast": (mine(), (last := mine()), lambda x, y: comm.broadcast(y, size - 1), size),
        "barrier, prepared": (None, None, lambda x, y: comm.barrier.prepare()(), None),
        "put, get, signal, wait": (mine(), zeros(), moves, previous + 1),
        "send, recv": (mine(), zeros(), in_group, previous + 1),
        "a module compiled before": (
            *(None, zeros()),
            *(lambda x, y: before.kernel("set_to")(comm, y, 3.0), 3),
        ),
        "a module compiled inside": (
            *(None, (summed := mine())),
            lambda x, y: inside.kernel("sum_within")(comm, device_comm, y, COUNT),
            total,
        ),
    }
    del last, summed
    if size == 1:
        del uses["send, recv"]
    driver.synchronize(device)
    comm.wait(_FREE, peer=previous, stream=side)
    for x, y, call, _ in uses.values():
        call(x, y)
    comm.signal(after, _FREE)
    driver.synchronize(device)
    comm.check()
    return [
        name
        for name, (_, y, _, want) in uses.items()
        if want is not None and not (from_gpu(y).reshape(-1) == want).all()
    ]


def main(backend, world_size=""):
    """See the top of this file."""
    if backend == "hip":
        import hip_runtime

        hip_runtime.quicken()
    driver.choose(driver.VENDORS[backend])
    arch = driver.device(0).arch
    for size in range(1, driver.num_devices() + 1):
        if world_size in ("", str(size)):
            warm(size, arch)
    before = kccl.compile(SOURCE, NAMES, target=backend, arch=arch)
    began = time.monotonic()

    def rank(comm):
        took_s = time.monotonic() - began
        return [use_all(comm, before), took_s]

    if world_size:
        found, shows = kccl.run_threads(rank, int(world_size), backend=backend), True
    else:
        with kccl.init(backend=backend) as comm:
            found, shows = comm.gather_objects(rank(comm)), comm.rank == 0
    # Lines of two ranks could mix.
    if shows:
        wrong = [each for each, _ in found]
        print(json.dumps({"wrong": wrong, "seconds": max(each for _, each in found)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
