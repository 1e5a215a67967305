"""Benchmarks of KCCL, its peers and its floors: `kccl bench all_reduce --baselines`.

Importing this package imports nothing of kccl. So peers/mpi_job.py can use the same timing and the
same checks under another MPI, in an environment that has only numpy and mpi4py.
"""
