"""One-sided calls: each rank puts data into its right neighbour's window and signals it.

mpirun -n 4 python examples/03_put_signal.py
"""

import numpy as np

import kccl

comm = kccl.init()
right = (comm.rank + 1) % comm.world_size
left = (comm.rank - 1) % comm.world_size

window = comm.window(64)
received = np.frombuffer(window.local, np.int64)
for step in range(10):
    comm.put(np.full(8, 100 * step + comm.rank), right, window)
    comm.signal(right)
    comm.wait(peer=left)
    assert (received == 100 * step + left).all()
    # This rank has read the data. Only now may the left neighbour put the next.
    comm.signal(left, signal_id=1)
    comm.wait(signal_id=1, peer=right)
print(f"rank {comm.rank} received from rank {left}: {received[0]}")
