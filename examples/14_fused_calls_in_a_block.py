"""A tensor-parallel block of a Llama, decoding: all_reduce, residual and RMSNorm as one call.

Each rank has a part of the heads and of the MLP, so both end with a sum over the ranks. Behind a
sum come the residual and the next norm. `Unfused` makes these three steps, and `Fused` one call in
their place. Both run under torch.compile(fullgraph=True), and in a CUDA graph if there is a GPU.

kccl run -n 2 -- python examples/14_fused_calls_in_a_block.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import kccl.interop.torch as kccl_torch

WIDTH, HEADS, HEAD, HIDDEN, ROWS, EPS = 256, 8, 32, 512, 4, 1e-6


class Unfused(torch.nn.Module):
    """The block. Attention is over the rows themselves: there is no cache here."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)

        def part(rows: int, columns: int, across: int) -> torch.nn.Parameter:
            """This rank's part of a matrix, which is cut along one dimension."""
            whole = torch.randn(rows, columns, generator=draw) / columns**0.5
            mine = whole.chunk(world_size, across)[rank]
            return torch.nn.Parameter(mine.to(device, torch.bfloat16), requires_grad=False)

        self.qkv = torch.nn.ParameterList(part(HEADS * HEAD, WIDTH, 0) for _ in range(3))
        self.output = part(WIDTH, HEADS * HEAD, 1)
        self.up, self.down = part(HIDDEN, WIDTH, 0), part(WIDTH, HIDDEN, 1)
        norms = 1 + torch.rand(2, WIDTH, generator=draw)
        self.norms = torch.nn.Parameter(norms.to(device, torch.bfloat16), requires_grad=False)

    def add_and_normalise(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + kccl_torch.all_reduce(partial)
        return F.rms_norm(residual, (WIDTH,), weight, EPS), residual

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the normalised rows and the residual, and returns those of the next block."""
        q, k, v = (F.linear(x, each).view(ROWS, -1, HEAD).transpose(0, 1) for each in self.qkv)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        partial = F.linear(heads.transpose(0, 1).reshape(ROWS, -1), self.output)
        x, residual = self.add_and_normalise(partial, residual, self.norms[0])
        partial = F.linear(F.silu(F.linear(x, self.up)), self.down)
        return self.add_and_normalise(partial, residual, self.norms[1])


class Fused(Unfused):
    """Makes the three steps in one call."""

    def add_and_normalise(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kccl_torch.all_reduce_rms_norm(partial, residual, weight, EPS)


dist.init_process_group("kccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
has_gpus = torch.cuda.device_count() >= world_size
device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
if has_gpus:
    torch.cuda.set_device(device)
kccl_torch.register(kccl_torch.communicator(device))

rows = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
x, residual = rows.to(device, torch.bfloat16)
unfused, fused = (kind(rank, world_size, device) for kind in (Unfused, Fused))
# Without a compiler for C++ on the machine, "aot_eager" stands in for Inductor.
backend = "inductor" if has_gpus else "aot_eager"
step = torch.compile(fused, fullgraph=True, backend=backend)

want, found = unfused(x, residual), step(x, residual)
for one, other in zip(want, found, strict=True):
    torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
if has_gpus:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = fused(x, residual)
    graph.replay()
    for one, other in zip(want, again, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
print(f"rank {rank} of {world_size} on {device}: the fused block gives the unfused one's rows")
dist.destroy_process_group()
