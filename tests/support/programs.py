"""Random programs: calls of every kind, size and algorithm, with late ranks."""

import time
from dataclasses import dataclass

import collectives
import numpy as np
import oracle

from kccl.base import dtypes
from kccl.plan.spec import Request
from kccl.plan.specs import SPECS

# Mostly short. Some are longer than a packet slot, so that a call takes several epochs.
COUNTS = (0, 1, 2, 5, 33, 200, 900, 2500)
OF_DATA = tuple(dict.fromkeys(spec.collective for spec in SPECS if spec.collective != "barrier"))
COLLECTIVES = ("all_reduce", *OF_DATA, "barrier")


@dataclass(frozen=True)
class Step:
    """One call of all ranks.

    Attributes:
        wants: Each rank's result, None where it has none; of a barrier no entry.
        late: The rank that calls late. If there is no such rank, none does.
    """

    collective: str
    inputs: tuple
    wants: tuple
    op: str
    root: int
    algorithm: str
    channel: int
    late: int


def algorithms_for(collective, world_size, dtype, backend="host"):
    """Names of the algorithms that can run such calls."""
    request = Request(collective, 8, world_size, backend, dtypes.of(dtype))
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
    of_it = collectives.load(collective)
    size = count * world_size if of_it.HAS_CHUNKS else count
    inputs = tuple(oracle.exact(dtype, op, size, rank, salt) for rank in range(world_size))
    wants = ()
    if collective != "barrier":
        wants = tuple(of_it.want(inputs, r, op=op, root=root) for r in range(world_size))
    return Step(
        collective,
        inputs,
        wants,
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
            # About as long as a call takes, or much longer.
            time.sleep(0 if number % 16 else 0.0005)
        if step.collective == "barrier":
            barriers[step.channel]()
            continue
        got = _make(comm, step, step.inputs[comm.rank].copy())
        what = (number, step.collective, step.algorithm, step.op, step.root, comm.rank)
        oracle.assert_result(got, step.wants[comm.rank], *what)


def _make(comm, step, x):
    call = collectives.load(step.collective).call
    keywords = {"algorithm": step.algorithm, "channel": step.channel}
    return call(comm, x, op=step.op, root=step.root, **keywords)
