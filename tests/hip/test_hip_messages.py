"""Messages on the hip backend: streams, groups, several blocks, replays."""

import numpy as np
import pytest
from hip_arrays import from_gpu, ordinal_of, to_gpu

import kccl
from kccl.base.abi import MOST_PIPES
from kccl.gpu import driver

LENGTHS = (0, 3, 9000)


def data(nbytes, sender):
    return np.random.default_rng([nbytes, sender]).integers(0, 256, nbytes, np.uint8)


def test_neighbours_exchange_messages(amd):
    def main(comm):
        ordinal, ranks = ordinal_of(comm), comm.world_size
        right, left = (comm.rank + 1) % ranks, (comm.rank - 1) % ranks
        for nbytes in LENGTHS:
            x, y = to_gpu(data(nbytes, comm.rank), ordinal), to_gpu(np.zeros(nbytes, "u1"), ordinal)
            with comm.group():
                comm.send(x, right)
                assert comm.recv(y, left) is y
            comm.barrier()
            comm.check()
            assert (from_gpu(y) == data(nbytes, left)).all()
            # Short ones are buffered. Longer ones are begun, and issued together.
            z = to_gpu(np.zeros(nbytes, "u1"), ordinal)
            comm.isend(x, left)
            comm.irecv(z, right).wait()
            driver.synchronize(driver.device(ordinal))
            comm.check()
            assert (from_gpu(z) == data(nbytes, right)).all()

    kccl.run_threads(main, 3, backend="hip")


def test_a_long_message_is_shared_by_several_blocks(amd):
    """It is longer than the packets of all its pipes."""
    nbytes = 300_001

    def main(comm):
        ordinal = ordinal_of(comm)
        x = to_gpu(data(nbytes, 0) if comm.rank == 0 else np.zeros(nbytes, "u1"), ordinal)
        op = comm.recv.prepare(x, 0) if comm.rank else comm.send.prepare(x, 1)
        op()
        driver.synchronize(driver.device(ordinal))
        comm.check()
        assert (from_gpu(x) == data(nbytes, 0)).all()
        return op.shape[0]

    assert kccl.run_threads(main, 2, backend="hip") == [MOST_PIPES] * 2


@pytest.mark.parametrize("count", [4, 1000])
def test_a_capture_of_messages_is_replayed(amd, count):
    gpu = driver.table()

    def main(comm):
        ordinal, peer = ordinal_of(comm), 1 - comm.rank
        x = to_gpu(np.full(count, comm.rank + 1.0), ordinal)
        y = to_gpu(np.zeros(count), ordinal)
        with driver.device(ordinal).current():
            stream = driver.make_stream()
            op = comm.recv.prepare(y, 0) if comm.rank else comm.send.prepare(x, 1, stream=stream)
            mode = gpu.constant("hipStreamCaptureMode.hipStreamCaptureModeGlobal")
            gpu.call("hipStreamBeginCapture", stream, mode)
            with comm.group():
                comm.send(x, peer, stream=stream)
                comm.recv(y, peer, stream=stream)
            comm.all_reduce(y, out=x, stream=stream)
            graph = gpu.call("hipStreamEndCapture", stream)
            instance = gpu.call(gpu.names.instantiate_graph, graph, 0)
            for _ in range(3):
                gpu.call("hipGraphLaunch", instance, stream)
            driver.synchronize_stream(stream)
            op()
            driver.synchronize(driver.device(ordinal))
        comm.check()
        return float(from_gpu(y)[-1])

    # Rank 0 has 2, and then the sums 3 and 6; what rank 1 gets in the end is the third sum.
    assert kccl.run_threads(main, 2, backend="hip") == [6, 12]


def test_an_absent_peer_is_named_and_reset_recovers(amd):
    def main(comm):
        ordinal = ordinal_of(comm)
        x = to_gpu(np.ones(8, np.float32), ordinal)
        comm.timeout = 0.2
        error = None
        if comm.rank == 0:
            comm.recv(x, 1)
            driver.synchronize(driver.device(ordinal))
            with pytest.raises(kccl.Timeout) as caught:
                comm.check()
            error = str(caught.value)
        comm.timeout = 20
        comm.reset()
        if comm.rank:
            comm.send(x, 0)
        else:
            comm.recv(x, 1)
        driver.synchronize(driver.device(ordinal))
        comm.check()
        return error

    error, _ = kccl.run_threads(main, 2, backend="hip")
    assert error.startswith("recv on channel 0: peer 1 did not arrive; rank 0 waited for peer 1")


def test_tags_and_any_source(amd):
    def main(comm):
        ordinal, other = ordinal_of(comm), 1 - comm.rank
        x, y = to_gpu(data(9000, comm.rank), ordinal), to_gpu(np.zeros(9000, "u1"), ordinal)
        request = comm.irecv(y, tag=3)
        comm.isend(x, other, tag=3)
        request.wait()
        driver.synchronize(driver.device(ordinal))
        comm.check()
        assert (from_gpu(y) == data(9000, other)).all()
        assert (request.source, request.tag) == (other, 3)

    kccl.run_threads(main, 2, backend="hip")
