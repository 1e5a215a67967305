"""reset() clears memory only when no rank's call can write to it any more. The order only."""

import threading
import time

import numpy as np

import kccl
from kccl.backends.host import HostBackend


def test_no_rank_clears_while_a_call_of_a_peer_runs(monkeypatch):
    """As on a GPU, where a kernel runs on behind Python's back: here rank 0's takes 0.2 s more."""
    events = []
    clear = HostBackend.clear

    def wait_for_calls(backend, what):
        if threading.current_thread().name == "slow":
            time.sleep(0.2)
        events.append("ended")

    def clear_and_record(backend):
        events.append("cleared")
        clear(backend)

    monkeypatch.setattr(HostBackend, "wait_for_calls", wait_for_calls)
    monkeypatch.setattr(HostBackend, "clear", clear_and_record)

    def main(comm):
        threading.current_thread().name = "slow" if comm.rank == 0 else "quick"
        comm.reset()
        x = np.ones(3)
        comm.all_reduce(x)
        return x.tolist()

    assert kccl.run_threads(main, 3) == [[3.0] * 3] * 3
    assert events == ["ended"] * 3 + ["cleared"] * 3
