"""Versions of PyTorch whose groups are made in other ways than in the one that is installed.

It is in `make test` where PyTorch is installed: no rank is started.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Options:
    """The description of a group in PyTorch before 2.14, which has no group in it."""

    def __setattr__(self, name, value):
        if name != "process_group":
            super().__setattr__(name, value)


@pytest.fixture
def world():
    """The default group of backend "kccl", of one rank."""
    import torch.distributed as dist

    import kccl.interop.torch  # noqa: F401

    dist.init_process_group("kccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.fixture
def older_world(monkeypatch, request):
    from torch.distributed import distributed_c10d

    monkeypatch.setattr(distributed_c10d, "_DistributedBackendOptions", Options)
    return request.getfixturevalue("world")


def test_options_without_the_group_of_other_backends(older_world):
    dist = older_world
    dist.all_reduce(x := torch.full((3,), 2.0))
    assert x.tolist() == [2] * 3
    mixed = dist.new_group(backend="cpu:gloo,cuda:kccl")
    assert mixed._get_backend(torch.device("cuda")) is mixed
    assert mixed._get_backend(torch.device("cpu")).name() == "gloo"
    dist.all_reduce(x, group=mixed)
    part = mixed.split_group([0], timeout=timedelta(seconds=20), group_name="part")
    assert part._get_backend(torch.device("cpu")).name() == "gloo"
    assert part._get_backend(torch.device("cuda")) is part


def test_what_pytorch_asks_before_it_registers_a_group(monkeypatch):
    """With init_process_group(device_id=...) it connects the group for the GPU so early."""
    import torch.distributed as dist

    from kccl.interop.torch_communicators import Communicators
    from kccl.interop.torch_group import ProcessGroup

    opened = []
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))
    monkeypatch.setattr(Communicators, "open", lambda _, device: opened.append(device))
    gpu = torch.device("cuda", 0)
    assert group._get_backend(gpu).supports_splitting and group._get_backend(gpu) is group
    group.eager_connect_single_device(gpu)
    group.eager_connect_single_device(torch.device("cpu"))
    assert opened == [gpu]
    group.shutdown()


def test_a_group_takes_no_options(world):
    """PyTorch's own calls leave them out, each version elsewhere."""
    group = world.group.WORLD
    x, y = torch.full((4,), 3.0), torch.zeros(4)
    calls = {
        "allreduce": ([x],),
        "allreduce_coalesced": ([x],),
        "broadcast": ([x],),
        "reduce": ([x],),
        "allgather": ([[y]], [x]),
        "allgather_coalesced": ([[y]], [x]),
        "_allgather_base": (y, x),
        "allgather_into_tensor_coalesced": ([y], [x]),
        "gather": ([[y]], [x]),
        "scatter": ([y], [[x]]),
        "reduce_scatter": ([y], [[x]]),
        "_reduce_scatter_base": (y, x),
        "reduce_scatter_tensor_coalesced": ([y], [x]),
        "alltoall": ([y], [x]),
        "alltoall_base": (y, x, [], []),
    }
    for name, arguments in calls.items():
        y.zero_()
        assert getattr(group, name)(*arguments).wait(), name
        assert (x == 3).all() and (len(arguments) == 1 or (y == 3).all()), name


@pytest.mark.parametrize("takes_store", [True, False])
def test_the_constructor_of_a_group(takes_store, monkeypatch):
    from kccl.interop import torch_versions

    given = []

    class Group:
        def __init__(self, *arguments):
            if len(arguments) == 3 and not takes_store:
                raise TypeError("returned holder-wrapped instance is not an alias instance")
            given.append(arguments)

    monkeypatch.setattr(torch_versions, "dist", SimpleNamespace(ProcessGroup=Group))
    torch_versions.init_group(Group.__new__(Group), "store", 1, 2)
    assert given == [("store", 1, 2) if takes_store else (1, 2)]


@pytest.mark.parametrize("shows_factor", [True, False])
def test_the_factor_of_a_sum(shows_factor):
    from kccl.interop.torch_versions import premul_factor

    class Op:
        def __getstate__(self):
            return ("PREMUL_SUM", 2.5)

    if shows_factor:
        Op.factor = 2.5
    assert premul_factor(Op()) == 2.5


def test_a_factor_that_is_no_number_is_an_error_of_pytorch(monkeypatch):
    """It names PyTorch's operator, and is of a type that PyTorch's users catch."""
    import torch.distributed as dist

    import kccl
    from kccl.interop import torch_reductions

    monkeypatch.setattr(torch_reductions, "premul_factor", lambda op: torch.tensor(1 + 2j))
    opts = SimpleNamespace(reduceOp=dist.ReduceOp.PREMUL_SUM)
    with pytest.raises(RuntimeError, match=r"^PREMUL_SUM: factor is \(1\+2j\), must be") as error:
        torch_reductions.reduction_of(opts)
    assert isinstance(error.value, kccl.InvalidArgument)
