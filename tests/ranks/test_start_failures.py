"""A rank on which kccl.init() raises any exception: all others raise at once, with its number and
reason, and can make a communicator afterwards.
"""

import pytest
from mpi_nodes import run as run_nodes
from ranks import run

MISHAPS = """
from kccl import start
from kccl.ranks import bootstrap, job, mpi, nodes, sockets

def mishap():
    raise RuntimeError("no luck")

def full():
    raise OSError(24, "Too many open files")

def strange():
    raise kccl.BackendError("a process of another user")

def fails_once(owner, name, fault):
    works = getattr(owner, name)

    def fails(*_):
        setattr(owner, name, works)
        fault()

    setattr(owner, name, fails)
    return works

for owner, name, fault in FAULTS:
    for victim in VICTIMS:
        if rank == victim:
            works = fails_once(owner, name, fault)
        try:
            kccl.init().close()
            said = "it works"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if rank == victim:
            setattr(owner, name, works)
        say(rank=f"{rank} {name} {victim}", message=said)
comm = kccl.init()
comm.barrier()
comm.close()
"""
# Whose function raises, and what the text of its exception is on this and on the other ranks.
BY_SOCKET = {
    "check_descriptors": ("job", "RuntimeError: no luck"),
    "machine_id": ("bootstrap", "RuntimeError: no luck"),
    "listen": ("sockets", "Too many open files"),
    "_reach": ("sockets", "a process of another user"),
    "_rank_of": ("sockets", "Too many open files"),
    "opener": ("start", "RuntimeError: no luck"),
}
FAULTS = {
    "RuntimeError: no luck": "mishap",
    "Too many open files": "full",
    "a process of another user": "strange",
}
LONG_WAITS = {"KCCL_TIMEOUT": "50", "KCCL_FIRST_TIMEOUT": "50"}


def check(said, world_size, places, victims):
    for name, (_, text) in places.items():
        for victim in victims:
            own = said.pop(f"{victim} {name} {victim}")["message"]
            if own == "it works":
                # Rank 0 reaches nobody, and the last rank accepts nobody.
                assert (name, victim) in {("_reach", 0), ("_rank_of", world_size - 1)}
                continue
            assert text in own
            for rank in {*range(world_size)} - {victim}:
                found = said[f"{rank} {name} {victim}"]["message"]
                assert "BackendError" in found and text in found, (name, victim, rank, found)
                assert f"start-up failed on rank {victim}" in found


def program(places, victims, rank):
    faults = ", ".join(
        f"({owner}, {name!r}, {FAULTS[text]})" for name, (owner, text) in places.items()
    )
    head = f"rank = int(os.environ[{rank!r}])\n"
    return head + MISHAPS.replace("FAULTS", f"[{faults}]").replace("VICTIMS", str(victims))


@pytest.mark.long
def test_all_raise_what_one_rank_raised():
    victims = [0, 1, 2]
    code, said, err = run(3, program(BY_SOCKET, victims, "KCCL_RANK"), **LONG_WAITS)
    assert code == 0, err
    check(said, 3, BY_SOCKET, victims)


def test_all_raise_what_one_rank_raised_between_nodes():
    places = {
        "check_descriptors": ("job", "RuntimeError: no luck"),
        "check_threads": ("mpi", "RuntimeError: no luck"),
        "_addresses": ("nodes", "Too many open files"),
    }
    said = run_nodes("mpich", 4, 2, program(places, [1], "PMI_RANK"), **LONG_WAITS)
    check(said, 4, places, [1])
