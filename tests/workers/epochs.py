"""A rank of test_epochs.test_processes: a random program that crosses the wrap many times."""

from programs import random_program, run_program

import kccl

comm = kccl.init()
run_program(comm, random_program(comm.world_size, 4000, seed=11))
comm.close()
print("right")  # mpirun passes it on
