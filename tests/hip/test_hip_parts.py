"""Calls with counts on the hip backend: launches of several blocks share parts of any length."""

import numpy as np
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl


def test_parts_of_different_lengths(amd):
    counts = (0, 700, 9000)
    begins = np.cumsum((0, *counts))

    def main(comm):
        rank, ordinal = comm.rank, ordinal_of(comm)
        own = slice(begins[rank], begins[rank + 1])
        whole = np.arange(begins[-1], dtype=np.float32)

        def out(values):
            return to_gpu(np.zeros_like(values), ordinal)

        found = [
            comm.all_gather(to_gpu(whole[own], ordinal), out=out(whole), counts=counts),
            comm.reduce_scatter(to_gpu(whole, ordinal), out=out(whole[own]), counts=counts),
            comm.scatter(to_gpu(whole, ordinal), 1, out=out(whole[own]), counts=counts),
        ]
        receives = [counts[rank]] * 3
        every = np.concatenate([whole[own]] * 3)
        exchanged = comm.all_to_all(
            to_gpu(whole, ordinal), out=out(every), send_counts=counts, recv_counts=receives
        )
        comm.barrier()
        comm.check()
        wanted = [whole, 3 * whole[own], whole[own], every]
        for got, want in zip([*found, exchanged], wanted, strict=True):
            assert (from_gpu(got).reshape(-1) == want).all()
        # Several blocks share it.
        x, into = to_gpu(whole[own], ordinal), out(whole)
        return comm.all_gather.prepare(x, out=into, counts=counts).shape[0]

    blocks = kccl.run_threads(main, 3, backend="hip")
    assert blocks == [-(-max(counts) // 512)] * 3
