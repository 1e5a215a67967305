"""Measures one MPI library in a separate job: `mpirun -n 2 python mpi_job.py '<JSON>'`.

Needs numpy and mpi4py but not kccl, because the environment may have another MPI than kccl's. The
argument is a JSON object (see `baselines.Request`). The last line that rank 0 prints is the JSON
list of rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> int:
    """Measure and print. Returns 1 when a result was wrong."""
    # Why: a script's folder is first on sys.path, and bench/peers has a torch.py and others that
    # would hide libraries of the same name.
    sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    import numpy as np
    from mpi4py import MPI

    from bench.harness import collective, measure
    from bench.peers import mpi

    comm = MPI.COMM_WORLD
    table = collective.load(request["collective"])
    problems = table.problems(
        request["sizes"],
        dtype=request["dtype"],
        np_dtype=np.dtype(request["dtype"]),
        op=request["op"],
        root=request["root"],
        in_place=request["in_place"],
        world_size=comm.size,
    )
    rows = []
    for problem in problems:
        rows += measure.measure(
            table,
            problem,
            mpi.contenders(MPI, comm, table, problem),
            rank=comm.rank,
            gather=comm.allgather,
            repeats=request["repeats"],
            iterations=request["iterations"],
        )
    if comm.rank == 0:
        print(json.dumps(rows), flush=True)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
