"""Two hosts, imitated on one: each has a network, a name and shared memory of its own."""

import os
import shutil
import subprocess
import sys

import pytest
from mpi_nodes import MPICH, WORKERS
from ranks import environment, facts, whole

# mpirun starts all ranks on this host; each goes to its own, two to a host.
RANK = """
host=$((PMI_RANK / 2))
exec ip netns exec $HOSTS$host unshare -m -u sh -c '
    hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"' host$host "$@"
"""


@pytest.fixture
def hosts():
    """The prefix of the names of two connected networks, which end with 0 and 1."""
    name = f"kccl{os.getpid()}-"

    def ip(words):
        return subprocess.run(["ip", *words.split()], capture_output=True).returncode

    can = shutil.which("ip") and shutil.which("unshare") and MPICH.exists()
    if not can or subprocess.run(["unshare", "-n", "-m", "-u", "true"]).returncode:
        pytest.skip("unshare -n is not possible here")
    try:
        steps = [f"netns add {name}{i}" for i in (0, 1)]
        steps.append(f"link add veth0 netns {name}0 type veth peer name veth0 netns {name}1")
        for i in (0, 1):
            steps += [
                f"-n {name}{i} addr add 10.77.0.{1 + i}/24 dev veth0",
                f"-n {name}{i} link set veth0 up",
                f"-n {name}{i} link set lo up",
            ]
        if any(map(ip, steps)):
            pytest.skip("unshare -n is not possible here: ip netns does not connect networks")
        yield name
    finally:
        for i in (0, 1):
            ip(f"netns del {name}{i}")


def run(hosts, *words):
    # MPICH takes ranks that one mpirun starts for neighbours, unless it is told that none are.
    variables = {
        "HOSTS": hosts,
        "MPIR_CVAR_NOLOCAL": "1",
        "PYTHONPATH": str(WORKERS.parent / "support"),
    }
    return subprocess.run(
        [str(word) for word in (MPICH, "-n", 4, "sh", "-c", RANK, "rank", sys.executable, *words)],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_collective(hosts):
    done = run(hosts, WORKERS / "nodes.py")
    assert (done.returncode, done.stdout.count("right")) == (0, 4), done.stdout + done.stderr


def test_a_rank_that_gives_up_is_named_on_both_hosts(hosts):
    program = """
import socket
comm = kccl.init()
comm.barrier()
comm.gather_objects(0)
if comm.rank == 3:
    comm.abort()
try:
    while True:
        comm.barrier()
except kccl.PeerLost as error:
    said = error.peer
part = comm.shrink() if comm.rank != 3 else comm
say(rank=comm.rank, host=socket.gethostname(), node=comm.node, local=comm.local_rank, peer=said,
    left=part.world_size)
time.sleep(0.5)
os._exit(0)
"""
    done = run(hosts, "-c", whole(program))
    said = {fact["rank"]: fact for fact in facts(done.stdout)}
    assert sorted(said) == [0, 1, 2, 3], done.stdout + done.stderr
    for rank, fact in said.items():
        assert (fact["host"], fact["node"], fact["local"]) == (
            f"host{rank // 2}",
            rank // 2,
            rank % 2,
        )
        assert fact["peer"] == 3 and fact["left"] == (4 if rank == 3 else 3)
