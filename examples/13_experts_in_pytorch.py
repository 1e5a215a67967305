"""A layer of experts in PyTorch, whose experts the ranks share: dispatch, two products, combine.

Each rank has rows of its own and owns some of the experts. A router chooses two experts for each
row. A kernel sends the rows to their experts' ranks, PyTorch multiplies them there, and another
kernel brings the results back, weighted and added in the order of the experts. Nothing waits for
the CPU: how many rows an expert gets is known on the device only.

python examples/13_experts_in_pytorch.py

runs on the simulator, `... host` on threads of this CPU, and `... cuda` on two GPUs.
"""

import sys

import torch

import kccl

SOURCE = """
#include <kccl/kccl.cuh>
using namespace kccl;

KCCL_KERNEL_OF(256) void send_rows(DeviceComm comm, Window window, uint32_t num_experts,
                                   uint32_t capacity, uint32_t columns, bf16* rows,
                                   uint32_t* counts, const bf16* x, const int32_t* chosen,
                                   int32_t* slots, uint32_t num_rows, uint32_t top_k) {
    const Experts experts = {window, num_experts, capacity, columns};
    dispatch(grid(), comm, experts, rows, counts, x, Routes{chosen, slots, num_rows, top_k});
}

KCCL_KERNEL_OF(256) void add_results(DeviceComm comm, Window window, uint32_t num_experts,
                                     uint32_t capacity, uint32_t columns, bf16* out,
                                     const bf16* results, const uint32_t* counts,
                                     const int32_t* chosen, int32_t* slots, const float* weights,
                                     uint32_t num_rows, uint32_t top_k) {
    const Experts experts = {window, num_experts, capacity, columns};
    combine(grid(), comm, experts, out, results, counts,
            Routes{chosen, slots, num_rows, top_k}, weights);
}
"""
RANKS, EXPERTS, TOP_K, ROWS, COLUMNS, HIDDEN = 2, 5, 2, 8, 64, 96


class SharedExperts(torch.nn.Module):
    """A layer of experts, of which this rank owns some.

    Attributes:
        up, down: The own experts' weights, (own, columns, hidden) and (own, hidden, columns).
    """

    def __init__(self, comm, module, device, up, down, most_rows, blocks):
        """Takes the weights of all experts. Collective."""
        super().__init__()
        self.comm, self.module, self.blocks = comm, module, blocks
        num_experts, columns, _ = up.shape
        per_rank = -(-num_experts // comm.world_size)
        own = slice(per_rank * comm.rank, per_rank * (comm.rank + 1))
        self.up, self.down = up[own].to(device), down[own].to(device)
        # All rows of a rank may choose the same expert. experts_bytes() of experts.cuh is at most
        # this.
        self.shape = (num_experts, most_rows, columns)
        slot = 2 * columns + 16
        self.window = comm.window(256 + 2 * comm.world_size * per_rank * (most_rows * slot + 256))
        self.device_comm = comm.device_comm(channels=blocks, max_bytes=8)
        each = (len(self.up), comm.world_size * most_rows, columns)
        self.rows = torch.zeros(each, dtype=torch.bfloat16, device=device)
        self.counts = torch.zeros(each[0], comm.world_size, dtype=torch.int32, device=device)

    def launch(self, name, *arguments):
        self.module.kernel(name)(
            *(self.comm, self.device_comm, self.window, *self.shape, *arguments),
            **{"grid": self.blocks, "block": None if self.comm.backend == "host" else 64},
        )

    def forward(self, x, logits, top_k):
        """Rows (n, columns) and the router's logits (n, experts) to rows (n, columns)."""
        weights, chosen = torch.topk(torch.softmax(logits.float(), dim=-1), top_k)
        weights, chosen = weights.contiguous(), chosen.int()
        slots, out = torch.empty_like(chosen), torch.empty_like(x)
        sizes = (len(x), top_k)
        self.launch("send_rows", self.rows, self.counts, x, chosen, slots, *sizes)
        # What lies behind an expert's rows is multiplied too, and nobody reads the result.
        results = torch.relu(self.rows @ self.up) @ self.down
        self.launch("add_results", out, results, self.counts, chosen, slots, weights, *sizes)
        return out


def on_one_rank(x, logits, up, down, top_k):
    """Computes the layer on one rank, which has all experts."""
    weights, chosen = torch.topk(torch.softmax(logits.float(), dim=-1), top_k)
    out = torch.zeros(x.shape)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], chosen[row], strict=True):
            out[row] += weight * (torch.relu(x[row] @ up[expert]) @ down[expert]).float()
    return out


backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
module = kccl.compile(SOURCE, ["send_rows", "add_results"], target=backend)
seeded = torch.Generator().manual_seed(1)
up = torch.randn(EXPERTS, COLUMNS, HIDDEN, generator=seeded).bfloat16() / 8
down = torch.randn(EXPERTS, HIDDEN, COLUMNS, generator=seeded).bfloat16() / 8


def main(comm):
    device = torch.device("cuda", comm.rank) if backend == "cuda" else torch.device("cpu")
    if backend == "cuda":
        torch.cuda.set_device(device)
    layer = SharedExperts(comm, module, device, up, down, most_rows=ROWS, blocks=2)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        # The ranks have different numbers of rows.
        count = ROWS - comm.rank
        x = torch.randn(count, COLUMNS, generator=generator).bfloat16()
        logits = torch.randn(count, EXPERTS, generator=generator)
        out = layer(x.to(device), logits.to(device), TOP_K).cpu()  # waits for the kernels
        comm.check()  # raises if one failed
        want = on_one_rank(x, logits, up, down, TOP_K)
        torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05)


kccl.run_threads(main, RANKS, backend=backend)
print(f"{RANKS} ranks on {backend}: {EXPERTS} experts, each row of {ROWS} to {TOP_K} of them")
