"""NVSHMEM as a peer of the benches, with a fake library."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
from bench_world import FakeWorld, problem

from kccl.bench import collectives
from kccl.bench.peers import nvshmem

HEAP = 0x4000
STREAM = 7


class Library(nvshmem.Library):
    """Records the calls. The functions named in `refuses` return 5."""

    def __init__(self, refuses=()):
        self.calls = []
        self._refuses = refuses

    def function(self, name, argtypes, restype=ctypes.c_int):
        def call(*arguments):
            assert len(arguments) == len(argtypes)
            self.calls.append((name, *arguments))
            if name == "nvshmemx_get_uniqueid":
                ctypes.memset(arguments[0] + 4, 0x5A, 124)
            if name == "nvshmemx_set_attr_uniqueid_args":
                self.calls.append(ctypes.string_at(arguments[2], 128))
            is_refused = name in self._refuses
            return HEAP * (not is_refused) if name == "nvshmem_malloc" else 5 * is_refused

        call.__name__ = name
        return call


def gpu(comm):
    wrap = lambda x, out, x_address, out_address, problem: SimpleNamespace(  # noqa: E731
        address=x_address, problem=problem
    )
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(comm=comm, stream=STREAM, wait=nothing, capture=nothing, wrap=wrap)


def peers(world_size, monkeypatch, act, **facts):
    """The results of act(peer) on every rank, and the ranks' fake libraries."""
    libraries = []

    def make():
        libraries.append(Library(**facts))
        return libraries[-1]

    monkeypatch.setattr(nvshmem, "Library", make)

    def main(comm):
        peer = nvshmem.NvshmemPeer(gpu(comm), None)
        return act(peer)

    return FakeWorld(world_size).run(main), libraries


def test_its_calls_are_in_place_on_its_own_memory(monkeypatch):
    def act(peer):
        found = peer.contenders(collectives.load("all_reduce"), problem(n=2))
        found += peer.contenders(collectives.load("barrier"), replace(problem(n=2), nbytes=0))
        peer.close()
        return [(each.library, each.algorithm, each.mode) for each in found], peer.notes()

    results, libraries = peers(2, monkeypatch, act)
    modes = [("nvshmem", "on_stream", mode) for mode in ("graph", "eager")]
    assert results == [(modes * 2, [])] * 2
    given = problem(n=2)
    kind = Library.type_of(given.dtype)
    for library in libraries:
        names = [call[0] for call in library.calls if isinstance(call, tuple)]
        # All ranks use rank 0's unique id.
        (uniqueid,) = (call for call in library.calls if isinstance(call, bytes))
        assert uniqueid[4:] == b"\x5a" * 124
        assert ("nvshmemx_get_uniqueid" in names) == (
            library.calls[0][0] == "nvshmemx_get_uniqueid"
        )
        reduce = (f"nvshmemx_{kind}_sum_reduce_on_stream", 0, HEAP, HEAP, given.count, STREAM)
        assert (
            reduce in library.calls and ("nvshmemx_barrier_on_stream", 0, STREAM) in library.calls
        )
        assert names[-2:] == ["nvshmem_free", "nvshmemx_hostlib_finalize"]
    assert (
        sum("nvshmemx_get_uniqueid" in (call[0] for call in each.calls) for each in libraries) == 1
    )


@pytest.mark.parametrize(
    "name",
    [
        "nvshmemx_get_uniqueid",
        "nvshmemx_set_attr_uniqueid_args",
        "nvshmemx_hostlib_init_attr",
    ],
)
def test_a_start_that_fails_is_noted_and_leaves_no_rows(name, monkeypatch):
    def act(peer):
        found = peer.contenders(collectives.load("all_reduce"), problem(n=2))
        peer.close()
        return found, peer.notes(), peer.libraries

    results, _ = peers(2, monkeypatch, act, refuses=[name])
    assert results == [([], [f"no nvshmem rows: RuntimeError: {name} returned 5"], {})] * 2


def test_without_memory_it_is_ended_at_once(monkeypatch):
    results, libraries = peers(
        2, monkeypatch, lambda peer: (peer.close(), peer.notes()), refuses=["nvshmem_malloc"]
    )
    said = f"no nvshmem rows: MemoryError: nvshmem_malloc refused {256 << 20} bytes"
    assert results == [(None, [said])] * 2
    for library in libraries:
        names = [call[0] for call in library.calls if isinstance(call, tuple)]
        assert names[-1] == "nvshmemx_hostlib_finalize" and "nvshmem_free" not in names


def test_notes_name_what_it_cannot_run_and_the_sizes(monkeypatch):
    averaged = replace(problem(n=2), op="avg")
    apart = replace(problem(n=2), in_place=False)
    long = replace(problem(n=2), nbytes=1 << 30)

    def act(peer):
        all_reduce = collectives.load("all_reduce")
        found = [peer.contenders(all_reduce, each) for each in (averaged, apart, long)]
        found.append(peer.contenders(collectives.load("all_gather"), problem(n=2)))
        return found, peer.notes()

    ((found, notes), _), _ = peers(2, monkeypatch, act)
    assert found == [[], [], [], []]
    assert notes == [
        f"no nvshmem rows at {averaged.nbytes} bytes: it has no average",
        f"no nvshmem rows at {apart.nbytes} bytes: measured in place only",
        f"no nvshmem rows at {1 << 30} bytes: larger than its heap here",
        f"no nvshmem rows at {averaged.nbytes} bytes: its all_gather is not measured",
    ]


def test_one_rank_does_not_start_it(monkeypatch):
    (results, libraries) = peers(1, monkeypatch, lambda peer: (peer.notes(), peer.libraries))
    assert results == [([], {})] and libraries == []


def test_a_missing_library_is_noted(monkeypatch):
    monkeypatch.setattr(nvshmem, "find_spec", lambda name: None)
    main = lambda comm: nvshmem.NvshmemPeer(gpu(comm), None).notes()  # noqa: E731
    for notes in FakeWorld(2).run(main):
        assert len(notes) == 1 and notes[0].endswith("libnvshmem_host.so: not installed")
