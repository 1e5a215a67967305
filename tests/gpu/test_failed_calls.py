"""A call that has failed on a GPU is raised by the rank's next call, of whatever kind.

The driver is that of tests/support/made_up_vendor.py, and C functions launch. So no GPU is needed.
"""

import pytest

import kccl
from kccl.base.abi import lib
from kccl.collectives import KINDS

FAILED = r"wait on signal_id 3: peer 0 did not arrive; rank 0 waited .*, after 0\.5 s"


def fail(comm):
    """A wait that runs on the GPU fails, as if it was the first."""
    mailbox = comm._backend.state.mailbox
    wait = {"status": lib.kKcclTimeout, "kernel": lib.kKcclWait, "channel": 3}
    mailbox.record = {**wait, "waited_ns": 500_000_000}
    mailbox.status = lib.kKcclTimeout
    comm.context.has_said_failure = False


def calls_of(comm, windows):
    """The calls of a communicator by their names; a call may be made again and again."""
    x, y, window = comm.empty(8), comm.empty(8), comm.window(64)

    def group(*calls, **how):
        with comm.group(**how) as made:
            for call in calls:
                call()
        return made

    messages = lambda: comm.send(x, 0), lambda: comm.recv(y, 0)
    requests = [comm.isend(x, 0), comm.irecv(y, 0)]
    requests[0].wait()
    timed = comm.all_reduce.prepare(x)
    arrays = {name: (x,) for name in KINDS if name != "barrier"}
    weight = comm.empty(8)
    arrays |= {name: (x, None, weight, 1e-5) for name in KINDS if name.endswith("_rms_norm")}
    one_sided = {"put": (x, 0, window), "get": (x, 0, window), "signal": (0,), "wait": ()}
    arguments = {"barrier": (), **arrays, **one_sided, "send": (x, 0), "recv": (y, 0)}
    how = {name: {"out": y} for name in arrays if name != "broadcast"}
    calls = {}
    for name, given in arguments.items():
        call, options = getattr(comm, name), how.get(name, {})
        op = call.prepare(*given, **options)
        calls |= {
            name: lambda call=call, given=given, options=options: call(*given, **options),
            f"{name}, prepared": op,
            f"{name}.prepare": lambda call=call, given=given, options=options: call.prepare(
                *given, **options
            ),
        }
    return calls | {
        "of no elements": lambda: comm.all_reduce(x[:0]),
        "of no elements, prepared": comm.all_reduce.prepare(x[:0]),
        "time": lambda: timed.time(3),
        "group": lambda: group(*messages),
        "an empty group": group,
        "group, prepared": group(*messages, prepare=True),
        "an empty group, prepared": group(prepare=True),
        "group.prepare": lambda: group(*messages, prepare=True),
        "isend": lambda: comm.isend(x, 0),
        "irecv": lambda: comm.irecv(y, 0),
        "a request's wait": requests[0].wait,
        "a request's test": requests[1].test,
        "launch": lambda: comm.context.launch(None, b"", stream=None),
        "window": lambda: comm.window(64),
        "window.close": lambda: windows.pop().close() if not comm.check() else None,
        "empty": lambda: comm.empty(4),
        "device_comm": lambda: comm.device_comm(channels=1, max_bytes=64),
        "split": lambda: comm.split(0),
        "gather_objects": lambda: comm.gather_objects(1),
        "check": comm.check,
    }


def test_the_next_call_of_any_kind_raises_it(toy_ranks):
    def main(comm):
        windows = [comm.window(64) for _ in range(3)]
        comm._backend.launch = lambda *args, **how: None
        calls = calls_of(comm, windows)
        # Before C knows a call, and after.
        for _ in range(2):
            for name, call in calls.items():
                fail(comm)
                with pytest.raises(kccl.Timeout, match=FAILED):
                    print(name, call())
            comm.reset()
            for name, call in calls.items():
                print(name, call())

    toy_ranks(main)


@pytest.mark.parametrize("is_said", [False, True])
def test_close_raises_what_nothing_has_said(toy_ranks, is_said):
    def main(comm):
        fail(comm)
        with pytest.raises(kccl.Timeout, match=FAILED):
            (comm.check if is_said else comm.close)()
        comm.close()
        with pytest.raises(kccl.Error, match="the communicator is closed"):
            comm.barrier()

    toy_ranks(main)
