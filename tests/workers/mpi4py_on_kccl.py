"""Runs a program in which `from mpi4py import MPI` gives kccl.interop.mpi."""

import runpy
import sys
from pathlib import Path

import mpi4py

from kccl.interop import mpi, mpi_opening

# The tests make few calls on each communicator.
mpi_opening._CALLS_BY_MPI = 1
mpi4py.MPI = mpi
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
