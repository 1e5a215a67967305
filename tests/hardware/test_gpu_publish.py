"""publish and collect on GPUs: within one GPU and over all, and their failures."""

from functools import partial

import numpy as np
import publish_rounds
import pytest
from gpu_vendor import BACKEND, WARP_SIZE
from publish_rounds import CASES, NOBODY, collected, slices

import kccl
from kccl import gpu
from kccl.bench.gpu.device import Gpu

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

THREADS = 9 * WARP_SIZE
TORCH_TYPES = {"uint8": torch.uint8, "float32": torch.float32}


@pytest.fixture(scope="module")
def module(publish_kernels):
    return publish_kernels()


class Exchange:
    """A kernel with the arrays that it reads and writes. Collective."""

    def __init__(self, comm, module, device_comm, case, *, blocks, count, rounds=3):
        self.comm, self.case = comm, case
        self.blocks, self.count, self.rounds = blocks, count, rounds
        kind, order, dtype = case
        self.kernel = module.kernel(publish_rounds.name(*case))
        self.device_comm = device_comm
        self.device = f"cuda:{comm.rank}"
        size = rounds * blocks * count
        how = {"dtype": TORCH_TYPES[dtype], "device": self.device}
        ranks = comm.world_size if kind == "all_ranks" else 1
        self.mine = torch.zeros(max(size, 1), **how)
        self.out = torch.zeros(max(size * blocks * ranks, 1), **how)
        self.window = comm.window(4 * blocks * comm.world_size)
        addresses = self.window.addresses
        addresses = [addresses[comm.rank]] if kind == "rank" else list(addresses)
        self.boards = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.num_boards = len(addresses) if order == "acq_rel" else 0
        self.own_board = 0 if kind == "rank" else comm.rank
        self.statuses = torch.zeros(blocks, dtype=torch.int32, device=self.device)
        self.late = torch.zeros(blocks * THREADS, dtype=torch.int32, device=self.device)

    def load(self, seed):
        size = self.rounds, self.blocks, self.count, self.case[2], seed
        mine = slices(self.comm.rank, *size).ravel()
        self.mine[: mine.size].copy_(torch.from_numpy(mine))
        # The kernel must overwrite all of these.
        self.out.view(torch.uint8).fill_(0xEE)
        self.statuses.fill_(99)
        self.late.fill_(99)

    def enqueue(self, absent=NOBODY, stream=None):
        self.kernel(
            *(self.comm, self.device_comm, self.mine, self.out),
            *(np.uint32(self.count), np.uint32(self.rounds), self.boards),
            *map(np.uint32, (self.num_boards, self.own_board, absent)),
            *(self.statuses, self.late),
            grid=self.blocks,
            block=THREADS,
            stream=stream,
        )

    def check(self, seed):
        torch.cuda.synchronize()
        self.comm.check()
        kind, _, dtype = self.case
        size = self.rounds, self.blocks, self.count, dtype, seed
        want = collected(self.comm, kind, *size).ravel()
        assert np.array_equal(self.out[: want.size].cpu().numpy(), want)
        assert not self.statuses.any() and not self.late.any()

    def run(self, seed=0):
        self.load(seed)
        self.enqueue()
        self.check(seed)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_block_collects_every_slice(world_size, module):
    """Odd lengths, length 0, more packets than threads. The kernels differ in their blocks."""

    def main(comm):
        torch.cuda.set_device(comm.rank)
        most = gpu.device(0).multiprocessors
        shapes = (most, 16), (most, 13), (7, 0), (most, 0), (1, 9), (most, 35)
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        for case in CASES:
            for blocks, count in shapes:
                size = {"blocks": blocks, "count": count, "rounds": 5}
                Exchange(comm, module, device_comm, case, **size).run()

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_cuda_graph_replays_twice(world_size, module):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        side = Gpu(comm)
        for reach in publish_rounds.REACHES:
            size = {"blocks": gpu.device(0).multiprocessors, "count": 16, "rounds": 5}
            made = Exchange(comm, module, device_comm, (reach, "relaxed", "uint8"), **size)
            made.run()
            replay = side.capture(partial(made.enqueue, stream=side.stream))
            for seed in (1, 2):
                made.load(seed)
                torch.cuda.synchronize()
                replay()
                made.check(seed)

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("reach", publish_rounds.REACHES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_message_that_is_too_long(world_size, reach, module):
    def main(comm):
        torch.cuda.set_device(comm.rank)
        case, blocks = (reach, "relaxed", "uint8"), 8
        ranks = world_size if reach == "all_ranks" else 1
        most = 128 * blocks * ranks
        device_comm = comm.device_comm(channels=1, max_bytes=16, exchange_bytes=most)
        fits, too_long = (
            Exchange(comm, module, device_comm, case, blocks=blocks, count=count)
            for count in (128, 129)
        )
        fits.run()
        too_long.load(0)
        # A quick kernel may fail before its launch returns.
        with pytest.raises(
            kccl.InvalidArgument,
            match=f"has {192 * blocks * ranks} bytes, must have at most {most}, the exchange_bytes",
        ):
            too_long.enqueue()
            torch.cuda.synchronize()
            comm.check()
        comm.reset()
        fits.run(1)

    kccl.run_threads(main, world_size, backend=BACKEND)


@pytest.mark.parametrize("reach", publish_rounds.REACHES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_that_does_not_come(world_size, reach, module):
    """Within a GPU only its kernel fails, over all ranks every kernel. All go on after reset()."""
    lost = world_size - 1

    def main(comm):
        torch.cuda.set_device(comm.rank)
        device_comm = comm.device_comm(channels=1, max_bytes=16)
        made = Exchange(
            *(comm, module, device_comm, (reach, "relaxed", "uint8")), blocks=6, count=3
        )
        made.run()
        if comm.rank == lost or reach == "all_ranks":
            comm.timeout = 0.3
            made.load(1)
            made.enqueue(absent=4 if comm.rank == lost else NOBODY)
            torch.cuda.synchronize()
            with pytest.raises(kccl.Timeout, match=f"block 4 of rank {lost} did not arrive"):
                comm.check()
            # The other blocks have left with a failed status.
            statuses = made.statuses.tolist()
            assert all(status != 0 for block, status in enumerate(statuses) if block != 4)
        comm.timeout = 30
        comm.reset()
        made.run(2)

    kccl.run_threads(main, world_size, backend=BACKEND)
