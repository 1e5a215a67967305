"""Mixed backends, PyTorch's debug level, and more than 8 ranks."""

import pytest
from torch_ranks import starter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


def test_mixed_backends_and_the_debug_level(ranks):
    """Under DETAIL the ranks compare their calls."""
    facts = ranks(
        2,
        """
start()
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
x = filled(3)
dist.all_reduce(x)
assert (x == total).all()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model(filled(2, 3)).sum().backward()
mixed = dist.new_group(backend="cpu:gloo,cuda:kccl")
assert {each.type for each in mixed._device_types} == {"cpu", "cuda"}
assert mixed._get_backend(torch.device("cpu")) is not mixed
x = filled(3)
dist.all_reduce(x, group=mixed)
assert (x == total).all()
assert dist.all_reduce(x, group=mixed, async_op=True).wait()
dist.barrier(group=mixed)
objects = [None] * 2
dist.all_gather_object(objects, rank, group=mixed)
assert objects == [0, 1]
if rank == 0:
    dist.send(x, 1, group=mixed)
else:
    dist.recv(x, 0, group=mixed)
alone = dist.new_group(backend="cpu:kccl")
x = filled(3)
dist.all_reduce(x, group=alone)
assert (x == total).all()
wrong = error_of(lambda: dist.all_reduce(filled(3 + rank)))
dist.destroy_process_group()
say(rank=rank, wrong=wrong)
""",
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )  # fmt: skip
    for fact in facts.values():
        assert "disagree" in fact["wrong"][1], fact


def test_a_part_of_a_group_of_mixed_backends_has_them_too(ranks):
    ranks(2, """
start()
mixed = dist.new_group(backend="cpu:gloo,cuda:kccl")
half = mixed.split_group([1], timeout=timedelta(seconds=20), group_name="half")
assert (half is None) == (rank == 0)
if half is not None:
    assert {each.type for each in half._device_types} == {"cpu", "cuda"}
    assert half._get_backend(torch.device("cuda")) is half
    gloo = half._get_backend(torch.device("cpu"))
    assert gloo is not half and gloo.options.group_name == half.group_name == "half"
    half.allreduce([x := filled(3)]).wait()
    assert (x == 2).all()
# From PyTorch 2.14 on a caller may choose.
for device in ("cpu", "cuda") if "device_types" in dist.ProcessGroup.split_group.__doc__ else ():
    part = mixed.split_group([0, 1], group_name="of-" + device, device_types=[torch.device(device)])
    assert {each.type for each in part._device_types} == {device}
    assert part.size() == 2 and part.group_name == "of-" + device
# The method's own argument, which older versions of dist.split_group do not pass on.
for types in ([torch.device("cpu"), torch.device("meta")], []):
    kind, text = error_of(
        lambda: type(mixed).split_group(mixed, [0, 1], group_name="none", device_types=types)
    )[:2]
    assert kind == "InvalidArgument", (kind, text)
    assert f"device_types has {'meta' if types else 'none'}, must have some of cpu, cuda" in text
say(rank=rank)
""")  # fmt: skip


@pytest.mark.takes(24)
def test_more_ranks_than_one_group_of_kccl_has(ranks):
    facts = ranks(
        9,
        """
start(timeout=timedelta(seconds=90))
x = filled(3)
dist.all_reduce(x)
right, left = (rank + 1) % world_size, (rank - 1) % world_size
got, far = torch.zeros(2), torch.zeros(2)
calls = [dist.P2POp(dist.isend, filled(2), right), dist.P2POp(dist.irecv, got, left)]
for work in dist.batch_isend_irecv(calls):
    work.wait()
if rank == 0:
    dist.send(filled(2), 8)
if rank == 8:
    dist.recv(far)
everyone = torch.zeros(9)
dist.all_to_all_single(everyone, filled(9))
# Rank i sends i + 1 elements to each rank.
parts = [torch.zeros(each + 1) for each in range(9)]
dist.all_to_all(parts, [filled(rank + 1) for _ in range(9)])
assert all((part == each + 1).all() for each, part in enumerate(parts))
rows, given = torch.zeros(45), [each + 1 for each in range(9)]
dist.all_to_all_single(rows, filled(9 * (rank + 1)), given, [rank + 1] * 9)
assert torch.equal(rows, torch.cat(parts))
dist.destroy_process_group()
say(rank=rank, sum=float(x[0]), got=float(got[1]), far=float(far[0]), all=everyone.tolist())
""",
    )  # fmt: skip
    for rank, fact in facts.items():
        assert fact["sum"] == 45 and fact["got"] == (rank - 1) % 9 + 1
        assert fact["far"] == (1 if rank == 8 else 0)
        assert fact["all"] == [each + 1 for each in range(9)]
