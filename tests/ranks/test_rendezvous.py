"""How ranks find each other at start-up: who is named when one goes, and who may connect."""

import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import pytest
from ranks import facts, start

import kccl
from kccl import start as starting
from kccl.base import clock, env
from kccl.ranks import losses, place, rendezvous, sockets
from kccl.ranks.losses import Watch

# Rank 1's process ends when it has sent its string.
ENDS = """
from kccl.ranks import rendezvous
rank = int(os.environ["KCCL_RANK"])
send = rendezvous._send

def send_and_end(*arguments):
    send(*arguments)
    os._exit(0)

if rank == 1:
    rendezvous._send = send_and_end
else:
    time.sleep(0.3)
try:
    kccl.init()
except kccl.PeerLost as error:
    say(rank=rank, peer=error.peer)
"""


def test_all_name_the_rank_that_ended_at_the_rendezvous(request):
    variables = {"KCCL_RENDEZVOUS": f"{request.node.name} {time.time()}", "KCCL_WORLD_SIZE": "4"}
    ranks = [start(ENDS, KCCL_RANK=str(rank), **variables) for rank in range(4)]
    ended = [rank.communicate(timeout=60) for rank in ranks]
    said = [fact for out, _ in ended for fact in facts(out)]
    assert said == [{"rank": rank, "peer": 1} for rank in (0, 2, 3)], ended


def look():
    """These ranks have nothing to look at while they wait."""


def host(name, world_size, seconds):
    with Watch(0, name, look) as watch:
        deadline = clock.now() + seconds
        return rendezvous._host_rendezvous(name, world_size, "0's", deadline, watch)


def join(name, rank):
    """What a rank gets as it joins, in a thread of its own."""
    got = []

    def run():
        with Watch(rank, name, look) as watch:
            try:
                deadline = clock.now() + 20
                got.append(rendezvous._join_rendezvous(name, rank, f"{rank}'s", deadline, watch))
            except kccl.Error as error:
                got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def join_and_go(name, rank):
    """A rank that sends its string and ends."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(f"\0{name}")
            except ConnectionRefusedError:
                continue
            with suppress(BrokenPipeError):  # it was taken for a stranger
                rendezvous._send(connection, [rank, f"{rank}'s"], clock.now() + 20)
            return


def test_a_rank_that_went_keeps_no_other_from_hearing_who_is_absent(request):
    name = f"{request.node.name} {time.time()}"
    gone = threading.Thread(target=join_and_go, args=(name, 1))
    gone.start()
    thread, got = join(name, 2)
    with pytest.raises(kccl.Timeout, match="rank 0 waited too long for rank 3") as caught:
        host(name, 4, 0.5)
    gone.join()
    thread.join()
    assert caught.value.peer == 3
    assert isinstance(got[0], kccl.Timeout) and got[0].peer == 3


def refuse_first(monkeypatch):
    """The process behind the first connection that is accepted is another user's."""
    check, seen = sockets.peer_pid, []

    def peer_pid(connection):
        is_accepted = connection.getsockname() != ""
        if is_accepted and not seen:
            seen.append(connection)
            raise kccl.BackendError("the process at the other end is of user 1, must be of user 2")
        return check(connection)

    monkeypatch.setattr(sockets, "peer_pid", peer_pid)


def test_strangers_do_not_end_the_rendezvous(request, monkeypatch):
    name = f"{request.node.name} {time.time()}"
    results = []
    thread = threading.Thread(target=lambda: results.append(host(name, 2, 20)))
    thread.start()
    refuse_first(monkeypatch)
    join_and_go(name, 1)
    joined, got = join(name, 1)
    thread.join()
    joined.join()
    assert results == [["0's", "1's"]] == got


@pytest.mark.parametrize("accepted", [3, 6])
def test_ranks_that_hear_that_rank_0_has_moved_reach_the_new_one(request, monkeypatch, accepted):
    """Those that the old one has accepted, and those that it has not, before it gives way."""
    name, size = f"{request.node.name} {time.time()}", 8
    wait, send_all = Watch.wait, rendezvous._send_all
    come = []

    def wait_or_give_way(self, source, seconds):
        if self._rank == 0 and len(come) == accepted:
            time.sleep(0.2)  # the others connect
            raise kccl.BackendError("the true rank 0 has come")
        has_come = wait(self, source, seconds)
        if self._rank == 0 and has_come:
            come.append(source)
        return has_come

    def send_and_wait(*arguments):
        send_all(*arguments)
        time.sleep(0.2)  # so long the old one does nothing more

    joining = [join(name, rank) for rank in range(1, size)]
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "_send_all", send_and_wait)
        patch.setattr(Watch, "wait", wait_or_give_way)
        with pytest.raises(kccl.BackendError, match="the true rank 0"):
            host(name, size, 20)
    everyone = host(name, size, 20)
    for thread, got in joining:
        thread.join()
        assert got == [everyone]


def test_strangers_do_not_end_the_connecting(monkeypatch):
    listener, name = sockets.listen()
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(4)]
    for stranger in strangers:
        stranger.connect(f"\0{name}")
    strangers[1].sendall(struct.pack("<I", 7))  # no rank
    strangers[2].close()
    strangers[3].sendall(struct.pack("<I", 1))
    refuse_first(monkeypatch)
    found = sockets.connect(0, [name, name], listener, clock.now() + 20)
    strangers[3].sendall(b"hello")
    assert found[1].recv(5) == b"hello"
    for each in (found[1], *strangers):
        each.close()


def test_errors_name_ranks_by_the_numbers_of_the_parent():
    for pid, error in (
        (os.getpid(), "rank 5 did not connect to rank 3 in time during split"),
        (2**22 + 1, "rank 3 lost rank 5 during split"),  # more than Linux gives
    ):
        listener, name = sockets.listen()
        names = [name, f"kccl-{pid}-nobody"]
        with pytest.raises(kccl.Error, match=error) as caught:
            sockets.connect(0, names, listener, 0.0, what="split", numbers=[3, 5])
        assert (caught.value.rank, caught.value.peer) == (3, 5)
        assert caught.value.collective == "split"


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1", "1e10"])
@pytest.mark.parametrize("name", ["KCCL_TIMEOUT", "KCCL_FIRST_TIMEOUT"])
def test_limits_that_no_clock_can_count_are_refused(name, seconds):
    with pytest.raises(kccl.InvalidArgument, match=f"{name} is .*, must be positive and at most"):
        env.read({name: seconds})


@pytest.mark.parametrize("wrong", ["nan", "-1", "soon"])
def test_a_rank_that_cannot_start_keeps_what_is_right(monkeypatch, wrong):
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", wrong)
    monkeypatch.setenv("KCCL_TIMEOUT", "7")
    monkeypatch.setenv("KCCL_EPOCH_BITS", "99")
    kept = env.read_what_is_right()
    assert (kept.first_timeout, kept.timeout, kept.epoch_bits) == (300.0, 7.0, 32)


def test_limits_of_years_are_none_for_poll(monkeypatch):
    assert 0 < sockets.poll_ms(1e9) < 2**31
    assert (sockets.poll_ms(-1), sockets.poll_ms(1e-6)) == (0, 1)
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "1e9")
    kccl.run_threads(lambda comm: comm.split(0).barrier(), 2)
    with Watch(0, "nobody", look) as watch:
        left, right = socket.socketpair()
        with left, right:
            right.sendall(b"1")
            assert watch.wait(left, 1e9)


def test_a_taken_rendezvous_says_which_process_may_be_wrong(request):
    name = f"kccl-{request.node.name}-{time.time()}"
    with (
        sockets.bind(name),
        pytest.raises(kccl.BackendError, match=r"If a rank started this process.*another job"),
    ):
        host(name, 2, 20)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (None, "for the other ranks at start-up .*: they have not called kccl"),
        (2, "for rank 2 at start-up .*: it has not called"),
    ],
)
def test_who_is_absent_is_one_rank_or_several(missing, words):
    with pytest.raises(kccl.Timeout, match=words):
        raise losses.absent(0, missing)


def test_a_place_that_many_have_asked_for_is_held(request, monkeypatch):
    """Its holder, which has met the others, accepts nobody."""
    name = f"{request.node.name} {time.time()}"
    held = place.Place(name, 1)
    monkeypatch.setattr(place, "_held", {})
    monkeypatch.setattr(place, "_GIVES_BACK_S", 0.2)
    with ExitStack() as asking:
        with suppress(BlockingIOError):
            for _ in range(100):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                asking.enter_context(connection).setblocking(False)
                connection.connect(f"\0{held._name}")
        with pytest.raises(kccl.BackendError, match="another process is rank 1 already"):
            place.Place(name, 1)


def test_a_send_that_waits_looks_at_the_clock():
    """Otherwise the time of its wait would hardly count."""
    ours, theirs = socket.socketpair()
    text = "x" * (4 << 20)
    with ours, theirs:
        # Nobody reads it.
        began = clock.now()
        with pytest.raises(TimeoutError):
            rendezvous._send(ours, text, began + 1)
        assert clock.now() - began >= 1
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        sent = pool.submit(lambda: rendezvous._send(ours, text, clock.now() + 20))
        time.sleep(2 * clock.LOOK_S)
        assert rendezvous._receive(theirs, clock.now() + 20) == text
        sent.result()


def test_strangers_take_no_place_away(request, monkeypatch):
    name = f"{request.node.name} {time.time()}"
    held = place.Place(name, 1)

    def stranger(connection):
        raise kccl.BackendError("of another user")

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{held._name}")
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "peer_pid", stranger)
            held.check()
        # This process is not its own helper either.
        connection.close()
        held.check()
    place.Place(name, 1).check()


@pytest.mark.parametrize(
    ("variable", "values", "words"),
    [
        (
            "KCCL_EPOCH_BITS",
            ("8", "9"),
            r"^KCCL_EPOCH_BITS is .*\b8 on rank 0",
        ),
        (
            "KCCL_STREAMS",
            ("2", "8"),
            r"^KCCL_STREAMS is .*\b2 on rank 0",
        ),
        (
            "KCCL_ALGORITHM",
            ("", "barrier_direct"),
            "^KCCL_ALGORITHM is .*not set on rank 0",
        ),
    ],
)
def test_variables_that_differ_are_named(monkeypatch, variable, values, words):
    """Each rank reads its own environment."""
    envs = [env.read({variable: value}) for value in values]

    def connect(ranks, rank, **_):
        find = partial(starting.opener, "host", "of_thread", rank)
        return starting._meet(ranks, envs[rank], "threads", rank, find)

    monkeypatch.setattr(starting, "_connect", connect)
    with pytest.raises(kccl.InvalidArgument, match=words):
        kccl.run_threads(lambda comm: comm.barrier(), 2)


def test_an_empty_number_is_said_in_plain_words():
    words = r"KCCL_TIMEOUT='' must be a number; unset it for the default, 30.0"
    with pytest.raises(kccl.InvalidArgument, match=words):
        env.read({"KCCL_TIMEOUT": ""})
    assert env.read({"KCCL_ALGORITHM": ""}).algorithm == ""
