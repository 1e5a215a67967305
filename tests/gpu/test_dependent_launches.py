"""When a captured call is launched as the programmatic dependent of the kernel before it."""

import re

import pytest
from stream_world import World

from kccl.backends import gpu as on_gpus
from kccl.base.abi import ffi, lib
from kccl.gpu import driver as gpu
from kccl.gpu.cuda import CUDA

STREAM = 5
CAPTURED = (1, 0)
OURS = "_ZN4kccl7kernels24all_reduce_one_shot_ll16IfNS_3SumELi2EEEv8KcclCall"
NO_KERNEL_OF_OURS = "_ZN4kccl9something6of_her5Ev"
THEIRS = "_Z4gemmPf"


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(gpu.table(), "call", world.driver.call)
    world.driver.capturing[STREAM] = CAPTURED
    return world


def launched(world):
    """The streams of launches as programmatic dependents, and those of ordinary launches."""
    op = world.prepared(STREAM)
    call = ffi.cast("KcclGpuOp *", op._handle)
    call.num_blocks, call.threads_per_block = 8, 128
    assert op() == "the result"
    return world.driver.early, world.driver.streams


@pytest.mark.parametrize(
    ("driver", "major", "wanted"), [(12020, 9, False), (12030, 8, False), (12030, 9, True)]
)
def test_drivers_and_chips_that_have_them(monkeypatch, driver, major, wanted):
    facts = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": 0}
    monkeypatch.setitem(vars(CUDA), "call", {"cuDriverGetVersion": driver}.__getitem__)
    monkeypatch.setitem(vars(CUDA), "attribute", lambda ordinal, name: facts[name])
    assert CUDA.launches_dependents(0) is wanted


def test_every_launch_that_is_refused_has_a_name():
    known = {getattr(lib, name) for name in dir(lib) if re.match(r"kKccl(No)?Launch", name)}
    assert set(on_gpus._LAUNCHED_BY) == known and len(known) == 5
    assert set(on_gpus._LAUNCHED_BY.values()) <= {*CUDA.queue, *CUDA.dependents_queue}


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


def test_the_call_before_is_announced_its_dependent_once(world):
    world.driver.nodes = {4: [None], STREAM: [OURS]}
    launched(world)
    # A second call that forks behind it is no dependent.
    assert launched(world) == ([STREAM], [STREAM])
    (told,) = world.driver.announced
    call = world.driver.calls[told]
    assert told == 2 and call.comm.world_size == 2
    assert call.dependent == lib.kKcclEarlyDependent


def test_no_dependent_is_announced_to_other_kernels(world):
    world.driver.nodes[STREAM] = [THEIRS]
    launched(world)
    world.driver.capturing[STREAM] = (0, 0)
    world.driver.nodes[STREAM] = [OURS]
    launched(world)
    assert world.driver.announced == []


@pytest.mark.parametrize("differs", ["abi_version", "arguments"])
def test_no_dependent_is_announced_to_what_may_be_no_call(world, differs):
    world.driver.nodes[STREAM] = [OURS]
    if differs == "arguments":
        world.driver.has_arguments = False
    else:
        world.driver.comm[differs] += 1
    assert launched(world) == EARLY
    assert world.driver.announced == []


@pytest.mark.parametrize("of", ["world", "driver"])
def test_a_call_that_takes_much_of_the_device_does_not_begin_early(world, of):
    """Nor does a call behind one that does, nor later calls that fork behind the same call."""
    world.driver.nodes[STREAM] = [OURS]
    (world if of == "world" else world.driver).fit = 3
    launched(world)
    world.fit = 4
    assert launched(world) == ([STREAM] * 2, [])
    (told,) = world.driver.announced
    assert world.driver.calls[told].dependent == lib.kKcclLateDependent


def test_a_dependent_that_cannot_be_announced_is_an_error(world):
    world.driver.nodes[STREAM] = [OURS]
    world.driver.refusal = 400
    with pytest.raises(Exception, match="error 400"):
        launched(world)
    assert world.driver.queue.how == lib.kKcclLaunchAnnounced
    # Nothing was launched, so the call may be tried again.
    assert (world.driver.early, world.driver.streams) == ([], [])
