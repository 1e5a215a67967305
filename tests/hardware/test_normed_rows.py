"""all_reduce_rms_norm on GPUs: one kernel and two give the host's bits, alone and in a graph."""

import pytest
from gpu_ranks import ranks

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_kernel_and_two_give_the_bits_of_the_host(world_size):
    ranks(world_size, """
from kccl.interop.torch_tensors import array

def drawn(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

def same(found, wanted):
    return torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for shape in ((3, 37), (8, 4096), (1, 8192), (300, 64)):
        partial = drawn(shape, dtype, 10 + comm.rank).cuda()
        rest, weight = drawn(shape, dtype, 2), drawn(shape[-1:], dtype, 3)
        total, hidden, want = comm.all_reduce(partial.clone()).cpu(), rest.clone(), rest.clone()
        small = torch.empty(shape, dtype=torch.float8_e4m3fn)
        scale = torch.tensor([0.02])
        given = array(total, "x"), array(weight, "weight"), 1e-5
        kccl.rms_norm(*given, residual=array(rest.clone(), "r"), out=array(small, "out"),
                      scale=array(scale, "scale"))
        kccl.rms_norm(*given, residual=array(hidden, "residual"), out=array(want, "out"))
        row_bytes = shape[-1] * dtype.itemsize
        fits = row_bytes <= (16384 if comm.world_size == 2 else 8192)
        algorithms = "", *["all_reduce_rms_norm"][:fits], "all_reduce_one_shot_ll16"
        for algorithm in algorithms:
            x, residual, how = partial.clone(), rest.cuda(), dict(algorithm=algorithm)
            comm.all_reduce_rms_norm(x, residual, weight.cuda(), 1e-5, **how)
            assert same(x, want) and same(residual, hidden), (dtype, shape, algorithm)
            residual, of_8_bits = rest.cuda(), small.cuda().zero_()
            comm.all_reduce_rms_norm(partial, residual, weight.cuda(), 1e-5, out=of_8_bits,
                                     scale=scale.cuda(), **how)
            assert same(of_8_bits, small), (dtype, shape, algorithm)
            x, before, weights = partial.clone(), rest.cuda(), weight.cuda()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x.copy_(partial)
                residual.copy_(before)
                comm.all_reduce_rms_norm(x, residual, weights, 1e-5, **how)
            for _ in range(2):
                x.zero_()
                graph.replay()
                assert same(x, want) and same(residual, hidden), (dtype, shape, algorithm)
        x = comm.all_reduce(partial.clone())
        assert same(kccl.rms_norm(x, weight.cuda(), 1e-5, residual=rest.cuda()), want)
comm.check()
say(rank=comm.rank)
""")  # fmt: skip
