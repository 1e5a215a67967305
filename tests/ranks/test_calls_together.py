"""A call of all ranks succeeds on all of them or on none, within comm.timeout, and only if all make
the same call.
"""

import gc
import os
import threading
import time

import numpy as np
import preloaded
import pytest
from long import long_after
from ranks import AT_ONCE

import kccl
from kccl import start, topology
from kccl.backends.host import HostBackend
from kccl.base import memory
from kccl.ranks import messages, sockets, windows

LIMIT = 0.3
CALLS = {
    "split": lambda comm: comm.split(0),
    "gather_objects": lambda comm: comm.gather_objects(comm.rank),
    "window": lambda comm: comm.window(4096),
    "device_comm": lambda comm: comm.device_comm(channels=1, max_bytes=64),
}


def check_all_right(comm):
    """All calls work, and with the same numbers on all ranks."""
    assert comm.gather_objects(comm.rank) == list(range(comm.world_size))
    window, part = comm.window(64), comm.split(0)
    comm.put(np.full(2, comm.rank, np.int32), (comm.rank + 1) % comm.world_size, window)
    part.barrier()
    before = (comm.rank - 1) % comm.world_size
    assert list(np.frombuffer(window.local, np.int32, 2)) == [before] * 2
    part.close()
    comm.device_comm(channels=1, max_bytes=64)
    assert comm.all_reduce(np.ones(1))[0] == comm.world_size


# ---- Different calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("names", [("split", "gather_objects"), ("window", "device_comm")])
def test_different_calls_are_an_error_on_all_ranks(names, odd):
    def main(comm):
        mine = names[0] if comm.rank == odd else names[1]
        with pytest.raises(kccl.InvalidArgument, match="the ranks disagree") as caught:
            CALLS[mine](comm)
        assert f"rank {comm.rank}: {mine}" in str(caught.value)
        assert all(f": {name}" in str(caught.value) for name in names)
        check_all_right(comm)

    kccl.run_threads(main, 3)


DIFFERENT = {
    "nbytes": lambda comm: comm.window(64 + comm.rank),
    "channels": lambda comm: comm.device_comm(channels=1 + comm.rank, max_bytes=64),
    "max_bytes": lambda comm: comm.device_comm(channels=1, max_bytes=64 + comm.rank),
    "shape": lambda comm: comm.empty((2, 3) if comm.rank else 6),
    "dtype": lambda comm: comm.empty(6, "int32" if comm.rank else "float32"),
}


@pytest.mark.parametrize("backend", ["host", "sim"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_arguments_are_an_error_on_all_ranks(name, backend):
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match=rf"{name} is .+ on rank {comm.rank} and "):
            DIFFERENT[name](comm)
        assert comm.gather_objects(comm.rank) == [0, 1]

    kccl.run_threads(main, 2, backend=backend)


WRONG = {
    "window": (lambda comm: comm.window(1.5), "nbytes is 1.5, must be an integer"),
    "empty": (lambda comm: comm.empty((3,), "nonsense"), "dtype is nonsense, must be one of"),
    "split": (lambda comm: comm.split("red"), "color is 'red', must be an integer"),
    "device_comm": (lambda comm: comm.device_comm(channels=0), "channels is 0, must be between"),
}


@pytest.mark.parametrize("backend", ["host", "sim"])
@pytest.mark.parametrize("name", WRONG)
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(name, backend):
    wrong, message = WRONG[name]
    calls = CALLS | {"empty": lambda comm: comm.empty(3)}

    def main(comm):
        heard = "" if comm.rank == 1 else f"{name} failed on rank 1: "
        started = time.monotonic()
        with pytest.raises(kccl.InvalidArgument, match=f"^{heard}{message}"):
            wrong(comm) if comm.rank == 1 else calls[name](comm)
        assert time.monotonic() - started < AT_ONCE
        assert comm.gather_objects(comm.rank) == [0, 1, 2]

    kccl.run_threads(main, 3, backend=backend)


@pytest.mark.parametrize("name", CALLS)
def test_a_checked_collective_beside_another_call(monkeypatch, name):
    monkeypatch.setenv("KCCL_CHECK", "1")

    def main(comm):
        call = comm.barrier if comm.rank == 0 else lambda: CALLS[name](comm)
        with pytest.raises(kccl.InvalidArgument, match=rf"rank 0: barrier.*; rank 1: {name}"):
            call()
        check_all_right(comm)

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_beside_reset_and_close(name):
    """reset() goes on once the other rank calls it, too."""

    def main(comm):
        if comm.rank == 0:
            comm.reset()
        else:
            with pytest.raises(kccl.Timeout, match=rf"rank 0 called reset\(\).*during {name}"):
                CALLS[name](comm)
            comm.reset()
        check_all_right(comm)
        if comm.rank == 1:
            with pytest.raises(kccl.PeerLost, match=f"during {name}: it has closed the comm"):
                CALLS[name](comm)

    kccl.run_threads(main, 2)


def test_a_reset_that_times_out_says_what_the_other_rank_does():
    gave_up = threading.Event()

    def main(comm):
        comm.timeout = LIMIT
        if comm.rank == 0:
            with pytest.raises(kccl.Timeout, match="for rank 1 during reset, which is in split"):
                comm.reset()
            gave_up.set()
        else:
            with pytest.raises(kccl.Timeout, match="during split"):
                comm.split(0)
            assert gave_up.wait(20)
        comm.timeout = 20
        comm.reset()
        check_all_right(comm)

    kccl.run_threads(main, 2)


# ---- One rank fails ------------------------------------------------------------------------------


def failing_once(monkeypatch, owner, name, rank, error):
    """The function fails in the thread of a rank, the first time after arm()."""
    real, is_armed = getattr(owner, name), threading.Event()

    def fake(*args, **keywords):
        if is_armed.is_set() and threading.current_thread().name == f"kccl rank {rank}":
            is_armed.clear()
            raise error
        return real(*args, **keywords)

    monkeypatch.setattr(owner, name, fake)
    return is_armed.set


EMFILE = OSError(24, "Too many open files")
PLACES = {
    "memfd": (windows.os, "memfd_create", EMFILE),
    "map": (windows, "map_shared", OSError(12, "Cannot allocate memory")),
    "room": (memory, "check_room", MemoryError()),
    "attach": (HostBackend, "_try_to_attach", kccl.BackendError("mishap")),
    "listen": (sockets, "listen", EMFILE),
}
FAILURES = [
    (name, place) for name in ("window", "device_comm") for place in ("memfd", "map", "room")
]
FAILURES += [("split", place) for place in PLACES]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("name", "place"), FAILURES)
def test_a_call_that_fails_on_one_rank_fails_on_all(monkeypatch, name, place, victim):
    owner, function, error = PLACES[place]
    arm = failing_once(monkeypatch, owner, function, victim, error)
    ready = threading.Barrier(3, arm)
    # Garbage of other tests has files too, and may go at any time.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def main(comm):
        check_all_right(comm)
        ready.wait(20)
        started = time.monotonic()
        with pytest.raises(kccl.BackendError, match=f"^{name} failed on rank {victim}: "):
            CALLS[name](comm)
        assert time.monotonic() - started < AT_ONCE
        check_all_right(comm)

    kccl.run_threads(main, 3)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("code", "words"),
    [(24, "raise the limit, as by `ulimit -n "), (23, "file-max"), (12, "max_map_count")],
)
def test_what_the_system_refuses_comes_with_its_limit_and_a_cure(code, words):
    error = messages.own_failure(OSError(code, os.strerror(code)), 1, "window")
    assert str(error).startswith("window failed on rank 1: ")
    assert os.strerror(code) in str(error) and words in str(error)


def test_one_color_that_fails_takes_the_other_along(monkeypatch):
    """The reason has the rank's number in the communicator that is split."""
    arm = failing_once(monkeypatch, windows.os, "memfd_create", 3, EMFILE)
    ready = threading.Barrier(4, arm)

    def main(comm):
        ready.wait(20)
        with pytest.raises(kccl.BackendError, match=r"^split failed on rank 3: .*Too many open"):
            comm.split(comm.rank % 2)
        part = comm.split(comm.rank % 2)
        assert part.gather_objects(comm.rank) == [comm.rank % 2, comm.rank % 2 + 2]

    kccl.run_threads(main, 4)


def test_a_start_up_that_fails_on_one_rank_fails_on_all(monkeypatch):
    errors = []
    arm = failing_once(monkeypatch, windows.os, "memfd_create", 1, EMFILE)
    arm()
    meet = start._meet

    def noted(*args):
        try:
            return meet(*args)
        except kccl.BackendError as error:
            errors.append(str(error))
            raise

    monkeypatch.setattr(start, "_meet", noted)
    with pytest.raises(kccl.BackendError, match=r"start-up failed on rank 1: .*Too many"):
        kccl.run_threads(lambda comm: None, 3)
    assert len(errors) == 3


OF_LIMITS = """
import resource
comm = kccl.init()
comm.barrier()
before = sorted(os.listdir("/proc/self/fd"))
limit = resource.getrlimit(resource.WHICH)
if comm.rank == 1:
    resource.setrlimit(resource.WHICH, (VALUE, limit[1]))
errors = []
for call in (lambda: comm.window(1 << 28), lambda: comm.empty((1 << 26,)), CALL):
    try:
        call()
        errors.append("")
    except kccl.BackendError as error:
        errors.append(str(error))
if comm.rank == 1:
    resource.setrlimit(resource.WHICH, limit)
comm.window(1 << 20), comm.split(0).barrier()
x = comm.all_reduce(np.ones(1))
after = sorted(os.listdir("/proc/self/fd"))
say(rank=comm.rank, errors=errors, leaked=len(after) - len(before), sum=x[0])
comm.barrier()
"""
LIMITS = {
    "RLIMIT_FSIZE": ("1 << 20", "lambda: comm.split(0)", "refused: .*File too large"),
    "RLIMIT_AS": (
        "int(open('/proc/self/statm').read().split()[0]) * 4096 + (1 << 23)",
        "lambda: comm.device_comm(channels=64, max_bytes=65536)",
        "RLIMIT_AS (ulimit -v) has left",
    ),
    "RLIMIT_NOFILE": ("len(before)", "lambda: comm.split(0)", "close some, or raise the limit"),
}


@pytest.mark.parametrize("name", long_after(1, LIMITS))
def test_a_limit_of_one_process_is_an_error_on_all_ranks(name):
    value, call, reason = LIMITS[name]
    program = OF_LIMITS.replace("WHICH", name).replace("VALUE", value).replace("CALL", call)
    code, said, err = preloaded.run(3, program)
    assert code == 0, err
    assert [said[rank]["sum"] for rank in range(3)] == [3, 3, 3]
    for fact in said.values():
        assert fact["leaked"] == 0
        for error in fact["errors"]:
            assert "failed on rank 1: " in error and reason.rpartition("*")[2] in error


@pytest.mark.parametrize("backend", ["host", "sim"])
def test_a_window_larger_than_the_memory_is_refused(backend):
    room = topology.memory_room()[0].nbytes

    def main(comm):
        for nbytes in (room * 2 // 3, 2**46):
            with pytest.raises(kccl.BackendError, match=r"are more than the .* bytes of memory"):
                comm.window(nbytes)
        assert comm.gather_objects(comm.rank) == [0, 1]

    kccl.run_threads(main, 2, backend=backend)


# ---- Limits --------------------------------------------------------------------------------------

LIMITED = CALLS | {"reset": lambda comm: comm.reset(), "shrink": lambda comm: comm.shrink()}


@pytest.mark.parametrize("of_part", [False, True])
@pytest.mark.parametrize("name", LIMITED)
def test_the_time_limit_is_that_of_every_call(name, of_part):
    """Also in a part, whose limit is its parent's; the late rank hears of it when it comes."""
    timed_out = threading.Barrier(3)

    def main(comm):
        if of_part:
            comm = comm.split(0)
        comm.timeout = LIMIT
        if comm.rank != 2:
            started = time.monotonic()
            with pytest.raises(kccl.Timeout, match=f"during {name}"):
                LIMITED[name](comm)
            assert time.monotonic() - started < LIMIT + AT_ONCE
        timed_out.wait(20)
        comm.timeout = 20
        if name in CALLS and comm.rank == 2:
            with pytest.raises(kccl.Timeout, match=f"for rank 2 during {name}.*heard it from"):
                LIMITED[name](comm)
        if name != "shrink":
            if name == "reset":
                comm.reset()
            check_all_right(comm)
        else:
            check_all_right(comm.shrink())

    kccl.run_threads(main, 3)


def test_a_part_has_the_limits_of_its_parent(monkeypatch):
    monkeypatch.setenv("KCCL_TIMEOUT", "17")
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "60")

    def main(comm):
        part = comm.split(0)
        assert (part.timeout, part.context.limit_s()) == (17, 60)
        part.gather_objects(1)
        assert part.context.limit_s() == 17
        comm.timeout = 19
        parts = comm.split(0), comm.split(0).shrink()
        assert [(each.timeout, each.context.limit_s()) for each in parts] == [(19, 19)] * 2

    kccl.run_threads(main, 2)


# ---- Dropped without close() ---------------------------------------------------------------------

DROPPED = """
comm = kccl.init()
part = comm.split(0)
part.barrier()
if comm.rank == 1:
    del part
else:
    started = time.monotonic()
    try:
        CALL
    except kccl.PeerLost as error:
        say(rank=comm.rank, seconds=time.monotonic() - started, text=str(error), peer=error.peer)
comm.barrier()
"""


@pytest.mark.parametrize(
    "call", long_after(1, ["part.barrier()", "part.gather_objects(1)", "part.wait(peer=1)"])
)
def test_a_dropped_communicator_tells_its_peers(call):
    code, said, err = preloaded.run(3, DROPPED.replace("CALL", call))
    assert code == 0, err
    assert sorted(said) == [0, 2]
    for fact in said.values():
        assert fact["seconds"] < AT_ONCE and fact["peer"] == 1
        assert "closed or dropped the comm" in fact["text"] or "without close()" in fact["text"]
