"""Benchmarks of KCCL, its peers and its floors: `kccl bench all_reduce --baselines`.

Importing this package imports nothing of kccl. So peers/mpi_job.py can use the same timing and the
same checks under another MPI, in an environment that has only numpy and mpi4py.
"""

# A program, whose interface is `kccl bench`.
__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
