"""Benchmarks: `kccl bench all_reduce --baselines` times KCCL beside other libraries (its peers) and
beside the machine's own latency (the floor).

Importing this package does not import kccl. So peers/mpi_job.py can use its timing and checks in a
job of another MPI, whose environment has only numpy and mpi4py.
"""

# Nothing is exported: users call the command `kccl bench`.
__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
