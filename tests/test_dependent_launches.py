"""When a captured call is launched as the programmatic dependent of the kernel before it."""

import pytest
from stream_world import World

from kccl import gpu
from kccl.abi import ffi, lib

STREAM = 5
CAPTURED = (1, 0)
OURS = "_ZN4kccl7kernels24all_reduce_one_shot_ll16IfNS_3SumELi2EEEv8KcclCall"
NO_KERNEL_OF_OURS = "_ZN4kccl9something6of_her5Ev"
THEIRS = "_Z4gemmPf"


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(gpu, "call", world.driver.call)
    world.driver.capturing[STREAM] = CAPTURED
    return world


def launched(world):
    """(as a programmatic dependent, as ever)."""
    op = world.prepared(STREAM)
    call = ffi.cast("KcclGpuOp *", op._handle)
    call.num_blocks, call.threads_per_block = 8, 128
    assert op() == "the result"
    return world.driver.early, world.driver.streams


EARLY, AS_EVER = ([STREAM], []), ([], [STREAM])


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ([OURS], EARLY),
        ([NO_KERNEL_OF_OURS], AS_EVER),
        ([THEIRS], AS_EVER),
        ([None], AS_EVER),
        ([OURS, OURS], AS_EVER),
        ([], AS_EVER),
    ],
)
def test_it_is_behind_one_kernel_of_ours(world, before, wanted):
    world.driver.nodes = {4: [None], STREAM: before}
    assert launched(world) == wanted


@pytest.mark.parametrize("said", [(0, 0), (2, 0), (1, 906)], ids=["no", "invalidated", "refused"])
def test_a_stream_that_is_not_captured_takes_an_ordinary_launch(world, said):
    world.driver.nodes[STREAM] = [OURS]
    world.driver.capturing[STREAM] = said
    assert launched(world) == AS_EVER


def test_behind_a_kernel_of_another_device_there_is_none(world):
    world.driver.nodes[STREAM] = [OURS]
    world.driver.node_context += 1
    assert launched(world) == AS_EVER


def test_without_the_drivers_functions_there_is_none(world):
    world.driver.nodes[STREAM] = [OURS]
    world.driver.queue.capture_info = 0
    assert launched(world) == AS_EVER


def test_what_the_driver_refuses_is_said(world):
    world.driver.nodes[STREAM] = [OURS]
    world.driver.error = 719
    with pytest.raises(Exception, match="error 719"):
        launched(world)
    assert world.driver.queue.how == lib.kKcclLaunchDependent
