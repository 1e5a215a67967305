"""Communicators go on after failures: reset() and shrink(), on the simulated machine."""

import inspect
import textwrap

import pytest
import sim_recovery
from long import hunted
from source_tree import replace_once

import kccl
from kccl import comm
from kccl.backends import host_memory, scratch, sim

pytestmark = pytest.mark.takes(30)

SEEDS = 2


def run(program, seed, world_size=3):
    # A rank that compiles for three seconds, while another one waits for it, would be late.
    sim_recovery.of_all_kinds()
    return kccl.run_threads(program, world_size, backend="sim", seed=seed, timeout=0.01)


@pytest.mark.long
def test_reset_of_two_ranks():
    run(sim_recovery.go_on, 1, 2)


@pytest.mark.long
def test_reset_of_three_ranks(monkeypatch):
    """Functions in which bugs are planted below are planted with the text they have."""
    for module, owner, name, old, _ in BUGS.values():
        if getattr(owner, name).__code__.co_filename != "<string>":
            plant(monkeypatch, module, owner, name, old, old)
    run(sim_recovery.go_on, 0, 3)


@pytest.mark.long
def test_shrink():
    assert run(sim_recovery.shrink, 0, 3) == [0, None, 1]


# ---- Planted bugs --------------------------------------------------------------------------------

# Name -> the module and the owner of a function, its name, and a text of it with its replacement.
BUGS = {
    "status_not_cleared": (
        *(comm, comm.Communicator, "reset"),
        *("limit_s())\n        state.status = lib.kKcclOk", "limit_s())"),
    ),
    "epochs_kept": (
        *(host_memory, host_memory.HostChannels, "clear"),
        *("ffi.memmove(self._states, bytes(num_bytes), num_bytes)", "pass"),
    ),
    "slots_kept": (scratch, scratch.Scratches, "clear", "scratch.window.clear()", "pass"),
    "sentinels_not_armed": (
        *(scratch, scratch.Scratches, "clear"),
        *("self._memory.arm(scratch.window, scratch.sentinel)", "pass"),
    ),
    "scratch_of_kernels_kept": (
        *(scratch, scratch.Scratches, "clear"),
        *("in self._scratches", "in self._scratches[:1]"),
    ),
    "own_scratch_kept": (
        *(scratch, scratch.Scratches, "clear"),
        *("in self._scratches", "in self._scratches[1:]"),
    ),
    "cleared_by_one_rank": (
        *(sim, sim.SimBackend, "clear"),
        *("self._scratches.clear()", "self._mesh.rank or self._scratches.clear()"),
    ),
    "signals_kept": (
        *(sim, sim.SimBackend, "clear"),
        *("host_state.clear_state(self.state)", "self.state.status = 0"),
    ),
}


def plant(monkeypatch, module, owner, name, old, new):
    """Replaces a function by one whose text differs."""
    text = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    functions = {}
    exec(replace_once(text, old, new, name), vars(module), functions)
    monkeypatch.setattr(owner, name, functions[name])


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_a_planted_bug_is_caught(monkeypatch, bug):
    """Ranks fail, get wrong data, or the machine has a finding."""
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((kccl.Error, AssertionError, pytest.fail.Exception)):
        for seed in range(SEEDS):
            run(sim_recovery.go_on, seed)
