"""Random programs: calls of every kind, size and algorithm, and who is late."""

import time
from dataclasses import dataclass

import numpy as np
import oracle

from kccl import dtypes
from kccl.plan import SPECS, Request

# Mostly short; some longer than a packet slot, so that a call takes several epochs.
COUNTS = (0, 1, 2, 5, 33, 200, 900, 2500)
COLLECTIVES = ("all_reduce", "all_reduce", "all_reduce", "broadcast", "barrier")


@dataclass(frozen=True)
class Step:
    """One call, the same on every rank; `late` is the rank that comes late, if there is one."""

    collective: str
    inputs: tuple
    want: np.ndarray
    op: str
    root: int
    algorithm: str
    channel: int
    late: int


def algorithms_for(collective, world_size, dtype):
    """Names of the algorithms that can run such calls."""
    request = Request(collective, 8, world_size, "host", dtypes.of(dtype))
    specs = [spec for spec in SPECS if spec.collective == collective]
    return [spec.name for spec in specs if spec.why_not(request) is None]


def random_program(world_size, num_calls, seed, *, counts=COUNTS, num_channels=1):
    rng = np.random.default_rng(seed)
    return [_random_step(world_size, salt, rng, counts, num_channels) for salt in range(num_calls)]


def _random_step(world_size, salt, rng, counts, num_channels):
    collective = str(rng.choice(COLLECTIVES))
    dtype = str(rng.choice(oracle.DTYPES))
    op = str(rng.choice(oracle.ops_of(dtype)))
    count = int(rng.choice(counts))
    root = int(rng.integers(world_size))
    names = algorithms_for(collective, world_size, dtype)
    inputs = tuple(oracle.exact(dtype, op, count, rank, salt) for rank in range(world_size))
    return Step(
        collective,
        inputs,
        inputs[root] if collective == "broadcast" else oracle.all_reduce(inputs, op),
        op,
        root,
        str(rng.choice(["", *names])),
        int(rng.integers(num_channels)),
        int(rng.integers(3 * world_size)),
    )


def run_program(comm, steps):
    """Makes the calls and checks each."""
    barriers = [comm.barrier.prepare(channel=channel) for channel in range(comm.num_channels)]
    for number, step in enumerate(steps):
        if comm.rank == step.late:
            # By about as much as a call takes, or by much more.
            time.sleep(0 if number % 16 else 0.0005)
        if step.collective == "barrier":
            barriers[step.channel]()
            continue
        x = step.inputs[comm.rank].copy()
        if step.collective == "broadcast":
            comm.broadcast(x, step.root, algorithm=step.algorithm, channel=step.channel)
        else:
            comm.all_reduce(x, op=step.op, algorithm=step.algorithm, channel=step.channel)
        what = (number, step.collective, step.algorithm, step.op, step.root, comm.rank)
        oracle.assert_same(x, step.want, *what)
