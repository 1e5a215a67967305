"""A rank of an MPI library in another job: `mpirun -n 2 python mpi_job.py '<JSON>'`.

It needs numpy and mpi4py but not kccl, because the environment may have another MPI than kccl's.
The argument is a JSON object with the name of the sockets and the CPUs of the ranks. Each rank
connects to the socket with its number. It reads orders from the socket, each a line of JSON, and
executes them until the socket is closed. second_job.py sends them.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> None:
    """Connects, and answers orders until the socket is closed."""
    # Removes this script's folder, which is first on sys.path. It has files such as torch.py, which
    # would hide libraries of the same name.
    sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from mpi4py import MPI

    import topology

    comm = MPI.COMM_WORLD
    cpu = request["cpus"][comm.rank]
    if cpu is not None:
        # Ignores failures: if pinning is forbidden, the bench reports it for its own ranks.
        topology.pin({cpu})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{request['name']}-{comm.rank}")
        with connection.makefile("rw", encoding="utf-8") as stream:
            rank = _Rank(MPI, comm)
            for line in stream:
                (order, argument), *_ = json.loads(line).items()
                stream.write(json.dumps(getattr(rank, f"on_{order}")(argument)) + "\n")
                stream.flush()


class _Rank:
    """Executes orders. The method on_NAME executes the order NAME; its answer is a JSON object."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm

    def on_problem(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Prepares a problem. Answers the library and algorithm of each contender."""
        import numpy as np

        from bench import collectives
        from bench.peers import mpi

        self._table = collectives.load(asked["collective"])
        dtype = asked["dtype"] or "float32"
        (self._problem,) = self._table.problems(
            [asked["nbytes"]],
            dtype=dtype,
            np_dtype=np.dtype(dtype),
            op=asked["op"] or "sum",
            root=asked["root"] or 0,
            in_place=asked["in_place"] is not False,
            world_size=self._comm.size,
        )
        self._contenders = mpi.contenders(self._mpi, self._comm, self._table, self._problem)
        return {"contenders": [[each.library, each.algorithm] for each in self._contenders]}

    def on_check(self, argument: list[int]) -> dict[str, Any]:
        """Checks a contender with the inputs of a seed. Answers the number of wrong elements."""
        index, seed = argument
        contender = self._contenders[index]
        contender.enter()
        comm = self._comm
        wrong = self._table.check(
            self._problem, contender.buffers, contender.run, comm.rank, comm.allgather, seed
        )
        return {"wrong": wrong + contender.wrong()}

    def on_time(self, argument: list[int]) -> dict[str, Any]:
        """Times calls of a contender on zeros. Answers the times of Contender.clock, and what its
        cpu() and waited() return.
        """
        index, iterations, warmup = argument
        contender = self._contenders[index]
        contender.buffers.zero()
        contender.enter()
        typical_us, single_us = contender.clock(iterations, warmup)
        answer = {"typical_us": typical_us.tolist(), "single_us": single_us.tolist()}
        return answer | {"cpu": contender.cpu(), "waited": contender.waited()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
