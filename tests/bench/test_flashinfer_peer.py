"""FlashInfer as a peer of the benches, with a fake library."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench_world import FakeWorld, problem

from kccl.bench import collectives
from kccl.bench.peers import flashinfer as flashinfer_peer

WIDTH = 4096


class Tensor:
    """What the peer uses of a tensor."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __iter__(self):
        return map(Tensor, self.array)

    def data_ptr(self):
        return self.array.ctypes.data


class Library:
    """A fake flashinfer.comm that records the calls."""

    AllReduceFusionPattern = SimpleNamespace(kAllReduce=0)

    def __init__(self, *, is_compiled=True, error=None):
        self.calls = []
        self.made = []
        self.destroyed = []
        self._is_compiled = is_compiled
        self._error = error

    def gen_trtllm_comm_module(self):
        return SimpleNamespace(is_compiled=self._is_compiled)

    def create_allreduce_fusion_workspace(self, **how):
        if self._error is not None and how["rank"] == 1:
            raise self._error
        self.made.append(how)
        destroy = lambda: self.destroyed.append(how["dtype"])  # noqa: E731
        return SimpleNamespace(world_size=how["world_size"], destroy=destroy)

    def allreduce_fusion(self, x, scratch, pattern, *, launch_with_pdl, output, use_oneshot):
        assert (pattern, launch_with_pdl, scratch.world_size) == (0, True, 2)
        assert x.array.shape == output.array.shape and x.data_ptr() != output.data_ptr()
        self.calls.append((*x.array.shape, use_oneshot))


def sized(nbytes, dtype="bfloat16", **more):
    kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    count = nbytes // kind.itemsize
    how = {"nbytes": nbytes, "count": count, "dtype": dtype, "np_dtype": kind}
    return replace(problem(n=2), **how, **more)


def gpu(comm):
    wrap = lambda x, out, x_address, out_address, problem: SimpleNamespace(  # noqa: E731
        x=x_address, out=out_address, problem=problem
    )
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(comm=comm, wait=nothing, capture=nothing, wrap=wrap)


@pytest.fixture
def on_both(monkeypatch):
    """on_both(act, ...): the results of act(peer) on two ranks, and their fake library."""

    def run(act, *, has_started=True, **facts):
        library = Library(**facts)
        torch = SimpleNamespace(
            bfloat16=np.dtype(np.uint16),
            float32=np.dtype(np.float32),
            distributed=SimpleNamespace(is_initialized=lambda: has_started),
            zeros=lambda shape, dtype, device: Tensor(np.zeros(shape, dtype)),
        )
        flashinfer = SimpleNamespace(__version__="1.2.3")
        found = {"flashinfer": flashinfer, "flashinfer.comm": library, "torch": torch}
        monkeypatch.setattr(flashinfer_peer, "import_module", found.__getitem__)
        main = lambda comm: act(flashinfer_peer.FlashInferPeer(gpu(comm), None))  # noqa: E731
        return FakeWorld(2).run(main), library

    return run


def test_its_calls_are_out_of_place_on_rows_of_a_width(on_both):
    all_reduce = collectives.load("all_reduce")

    def act(peer):
        found = []
        for given in (sized(1024), sized(8192), sized(65536), sized(8192, "float32")):
            for each in peer.contenders(all_reduce, given):
                assert each.buffers.x != each.buffers.out and each.buffers.problem == given
                found.append((each.library, each.algorithm, each.mode, given.nbytes))
        peer.close()
        return found, peer.notes(), peer.libraries

    results, library = on_both(act)
    modes = ("graph", "eager")
    algorithms = {1024: ["one_shot"], 8192: ["one_shot"], 65536: ["one_shot", "two_shot"]}
    wanted = [
        ("flashinfer", algorithm, mode, size)
        for size in (1024, 8192, 65536, 8192)
        for algorithm in algorithms[size]
        for mode in modes
    ]
    assert results == [(wanted, [], {"flashinfer": "1.2.3"})] * 2
    made = [(1, 512), (1, WIDTH), (8, WIDTH), (1, 2048)]
    wanted = [*((*shape, True) for shape in made), (8, WIDTH, False)]
    assert sorted(library.calls) == sorted(2 * wanted)
    # One workspace for each element type and rank, none of them with multicast.
    assert len(library.made) == len(library.destroyed) == 4
    for made in library.made:
        assert (made["backend"], made["world_size"], made["hidden_dim"]) == ("trtllm", 2, WIDTH)
        assert made["max_token_num"] * WIDTH * 2 == 16 << 20


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (
            {"is_compiled": False},
            "RuntimeError: its kernels are not compiled: call it once, which takes minutes",
        ),
        (
            {"has_started": False},
            "RuntimeError: torch.distributed, through which its ranks connect, has not started",
        ),
    ],
)
def test_without_what_it_needs_it_has_no_rows(on_both, facts, cause):
    def act(peer):
        found = peer.contenders(collectives.load("all_reduce"), sized(8192))
        peer.close()
        return found, peer.notes(), peer.libraries

    results, _ = on_both(act, **facts)
    assert results == [([], [f"no flashinfer rows: {cause}"], {})] * 2


def test_if_one_rank_lacks_memory_no_rank_measures(on_both):
    def act(peer):
        all_reduce = collectives.load("all_reduce")
        found = [peer.contenders(all_reduce, sized(8192)) for _ in range(2)]
        peer.close()
        return found, peer.notes()

    results, library = on_both(act, error=RuntimeError("no memory"))
    assert results == [([[], []], ["no flashinfer rows: RuntimeError: no memory"])] * 2
    assert library.calls == [] and len(library.made) == 1


def test_notes_name_what_it_cannot_run_and_the_sizes(on_both):
    def act(peer):
        all_reduce = collectives.load("all_reduce")
        given = (
            sized(8192, op="avg"),
            sized(8192, "int32"),
            sized(8192 + 16),
            sized(8),
            sized(32 << 20),
        )
        found = [peer.contenders(all_reduce, each) for each in given]
        found.append(peer.contenders(collectives.load("all_gather"), sized(8192)))
        return found, peer.notes()

    results, library = on_both(act)
    assert results[0] == (
        [[]] * 6,
        [
            "no flashinfer rows at 8192 bytes: it only computes sums",
            "no flashinfer rows at 8192 bytes: not made for int32 on 2 GPUs",
            f"no flashinfer rows at 8208, 8 bytes: not whole rows of {WIDTH} elements",
            f"no flashinfer rows at {32 << 20} bytes: larger than its workspace here",
            "no flashinfer rows at 8192 bytes: it has no all_gather",
        ],
    )
    assert library.calls == []
