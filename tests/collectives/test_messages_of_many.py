"""send, recv, isend, irecv and group between any two of more than 8 ranks on the host.

tests/workers/messages.py has the programs; tests/ranks/test_nodes_messages.py runs them on nodes.
"""

import threading
from pathlib import Path

import numpy as np
import preloaded
import pytest
from long import long_after
from ranks import run

import kccl

WORKERS = Path(__file__).resolve().parents[1] / "workers"


@pytest.fixture
def messages(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKERS))
    import messages

    return messages


@pytest.mark.parametrize("world_size", long_after(1, [9, 16]))
def test_everything(messages, world_size):
    kccl.run_threads(messages.check_all, world_size, timeout=60)


@pytest.mark.long
def test_64_ranks():
    """Each sends to the one that is a third of the way round, in another team of all."""

    def main(comm):
        to, source = (comm.rank + 21) % 64, (comm.rank - 21) % 64
        got = np.zeros(20_000, np.int32)
        with comm.group():
            comm.send(np.full(20_000, comm.rank, np.int32), to, tag=comm.rank)
            comm.recv(got, tag=source)
        assert (got == source).all()

    kccl.run_threads(main, 64, timeout=60)


def test_what_fails_is_named_and_reset_forgets_it():
    """Ranks 1 and 9 of 10 are in no team together."""
    over = threading.Barrier(10)

    def main(comm):
        comm.barrier()
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.zeros(1), 9, tag=7)
            comm.isend(np.zeros(100_000), 9, tag=8)
        if comm.rank == 9:
            comm.timeout = 0.05
            text = (
                r"recv on tag 3: peer 1 did not arrive; rank 9 waited for peer 1: 2 other messages "
                r"of peer 1 have come"
            )
            with pytest.raises(kccl.Timeout, match=text) as caught:
                comm.recv(np.zeros(1), 1, tag=3)
            assert caught.value.peer == 1
        if comm.rank == 1:
            # It hears the reason, though nobody else waits.
            with pytest.raises(kccl.Timeout, match=r"rank 9 waited.*rank 1 heard it from rank 9"):
                comm.recv(np.zeros(1), 9)
        over.wait(20)
        comm.timeout = 20
        comm.reset()
        x = np.zeros(2)
        if comm.rank == 1:
            comm.send(np.ones(2), 9)
        if comm.rank == 9:
            assert comm.recv(x).tolist() == [1, 1]
        assert comm.all_reduce(np.ones(1)) == [10]

    kccl.run_threads(main, 10, timeout=60)


def test_lengths_differ():
    def main(comm):
        if comm.rank == 1:
            comm.send(np.zeros(8, np.int8), 9, tag=3)
        if comm.rank == 9:
            text = (
                r"rank 9: recv, 16 bytes; rank 1: send, 8 bytes; all ranks may go on after "
                r"comm\.reset\(\)"
            )
            with pytest.raises(kccl.InvalidArgument, match=text):
                comm.recv(np.zeros(16, np.int8), 1)

    kccl.run_threads(main, 10, timeout=60)


def test_a_failed_call_of_another_kind_ends_a_receive():
    """Rank 9 fails in a barrier. Rank 1, in no team with it, hears it in its receive."""

    def main(comm):
        comm.barrier()
        if comm.rank == 9:
            comm.timeout = 0.05
            with pytest.raises(kccl.Timeout):
                comm.barrier()
        if comm.rank == 1:
            with pytest.raises(kccl.Timeout, match="heard it from rank 9"):
                comm.recv(np.zeros(1), 9)
        comm.gather_objects(0)

    kccl.run_threads(main, 10, timeout=60)


def test_a_receive_that_fails_ends_collectives():
    """Rank 9 gives up. The others wait for it in an all_reduce, which it does not reach."""

    def main(comm):
        comm.barrier()
        if comm.rank == 9:
            comm.timeout = 0.05
            with pytest.raises(kccl.Timeout):
                comm.recv(np.zeros(1), 1)
            return
        with pytest.raises((kccl.Timeout, kccl.PeerLost), match=r"recv.*rank 9"):
            comm.all_reduce(np.ones(1))

    kccl.run_threads(main, 10, timeout=60)


def test_of_a_sender_that_has_closed_only_short_messages_come():
    closed = threading.Barrier(2)

    def main(comm):
        if comm.rank == 1:
            requests = [comm.isend(np.full(3, 5.0), 9), comm.isend(np.ones(100_000), 9, tag=1)]
            comm.close()
            closed.wait(20)
            del requests
        if comm.rank == 9:
            closed.wait(20)
            assert comm.recv(np.zeros(3), 1).tolist() == [5, 5, 5]
            with pytest.raises(kccl.PeerLost, match="recv on tag 1: peer 1 has closed") as caught:
                comm.recv(np.zeros(100_000), 1, tag=1)
            assert caught.value.peer == 1

    kccl.run_threads(main, 10, timeout=60)


LOST = """
comm = kccl.init()
x = np.zeros({count})
if comm.rank == 9:
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
said, peer = "", None
try:
    # Some ranks may still be in it when rank 9 is killed.
    comm.barrier()
    if comm.rank == 1:
        {call}
    else:
        comm.all_reduce(x)
except kccl.PeerLost as error:
    said, peer = str(error), error.peer
part = comm.shrink()
took = np.zeros(1)
with part.group():
    part.send(np.full(1, float(part.rank)), (part.rank + 1) % 9)
    part.recv(took)
say(rank=comm.rank, said=said, peer=peer, took=took.tolist())
part.barrier()
"""


@pytest.mark.long
@pytest.mark.parametrize(("call", "count"), [("comm.recv(x, 9)", 1), ("comm.send(x, 9)", 100_000)])
def test_a_lost_peer_is_named(call, count):
    code, said, err = preloaded.run(10, LOST.format(call=call, count=count))
    assert code == -9, err
    assert sorted(said) == list(range(9)), (said, err)
    for rank, fact in said.items():
        assert fact["peer"] == 9 and "the process of peer 9 has ended" in fact["said"]
        assert fact["took"] == [(rank - 1) % 9]


INTERRUPTED = """
comm = kccl.init()
comm.barrier()

def interrupt(*_):
    raise ZeroDivisionError

said = ""
try:
    if comm.rank == 9:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        comm.recv(np.zeros(1))
    else:
        comm.recv(np.zeros(1), 9)
except (ZeroDivisionError, kccl.Error) as error:
    said = str(error)
say(rank=comm.rank, said=said)
comm.gather_objects(0)
"""


@pytest.mark.long
def test_an_interrupt_ends_the_receives_of_all():
    code, said, err = preloaded.run(10, INTERRUPTED)
    assert code == 0, err
    assert sorted(said) == list(range(10)), (said, err)
    for rank, fact in said.items():
        assert rank == 9 or "rank 9 was interrupted" in fact["said"], fact


@pytest.mark.long
def test_processes():
    program = f"""
sys.path.insert(0, {str(WORKERS)!r})
import messages
comm = kccl.init()
messages.check_all(comm, 1)
say(rank=comm.rank)
comm.barrier()
"""
    code, said, err = run(10, program)
    assert code == 0 and len(said) == 10, err
