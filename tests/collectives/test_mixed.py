"""Calls of every kind in random order: on one channel, on several, on two communicators."""

import threading

import pytest
from long import long_after
from programs import random_program, run_program

import kccl


# ranks/test_epochs.py has more of them, with narrow epochs.
@pytest.mark.parametrize(("world_size", "num_steps"), long_after(2, [(2, 800), (8, 400), (4, 800)]))
def test_one_channel(world_size, num_steps):
    steps = random_program(world_size, num_steps, seed=world_size)
    kccl.run_threads(lambda comm: run_program(comm, steps), world_size)


def test_channels_are_independent():
    steps = random_program(4, 1000, seed=42, num_channels=4)
    kccl.run_threads(lambda comm: run_program(comm, steps), 4)


def test_two_communicators_by_turns():
    steps = random_program(3, 600, seed=1)

    def main(comm):
        # In the opposite order of ranks, so that a mix-up of the two shows.
        other = comm.split(0, key=-comm.rank)
        assert (other.rank, other.world_size) == (2 - comm.rank, 3)
        for begin in range(0, len(steps), 20):
            run_program(comm if begin % 40 else other, steps[begin : begin + 20])

    kccl.run_threads(main, 3)


def test_two_communicators_at_once():
    """Each rank uses the second in another thread, while it makes other calls with the first."""
    steps = random_program(2, 500, seed=2), random_program(2, 700, seed=3)

    def main(comm):
        other = comm.split(0)
        errors = []

        def drive():
            try:
                run_program(other, steps[1])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=drive)
        thread.start()
        run_program(comm, steps[0])
        thread.join()
        if errors:
            raise errors[0]

    kccl.run_threads(main, 2)


def test_parts_of_a_communicator():
    """Ranks 0, 2, 4 and ranks 1, 3 call at the same time; then all of them call together."""
    parts = random_program(3, 300, seed=4), random_program(2, 300, seed=5)
    whole = random_program(5, 200, seed=6)

    def main(comm):
        part = comm.split(comm.rank % 2)
        run_program(part, parts[comm.rank % 2])
        run_program(comm, whole)

    kccl.run_threads(main, 5)
