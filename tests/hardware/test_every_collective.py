"""Every collective on GPUs gives the oracle's bits, by every algorithm."""

import collectives
import oracle
import pytest
from gpu_algorithms import of_gpus
from gpu_arrays import bits_of, to_gpu
from gpu_vendor import BACKEND
from programs import OF_DATA

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

COUNTS = (1, 5, 500, 40000)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", OF_DATA)
def test_bits_are_the_oracles(name, world_size):
    of_it = collectives.load(name)

    def main(comm):
        torch.cuda.set_device(comm.rank)
        wrong = []
        calls = [(each, kind) for kind in ("bfloat16", "int32") for each in algorithms(kind)]
        for number, (algorithm, dtype) in enumerate(calls):
            for count in COUNTS:
                root = number % world_size
                size = count * world_size if of_it.HAS_CHUNKS else count
                inputs = [oracle.exact(dtype, "sum", size, r, number) for r in range(world_size)]
                x = to_gpu(inputs[comm.rank], comm.rank)
                got = of_it.call(comm, x, op="sum", root=root, algorithm=algorithm)
                want = of_it.want(inputs, comm.rank, op="sum", root=root)
                if want is None or got is None:
                    different = int(want is not got)
                else:
                    bits = want.view(f"int{8 * want.itemsize}")
                    different = int((bits_of(got).reshape(-1) != bits).sum())
                if different:
                    wrong.append((algorithm, dtype, count, different))
        comm.check()
        return wrong

    def algorithms(dtype):
        return of_gpus(name, world_size, dtype)

    for rank, wrong in enumerate(kccl.run_threads(main, world_size, backend=BACKEND)):
        assert wrong == [], f"rank {rank}"
