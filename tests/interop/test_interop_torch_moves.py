"""What only moves bits takes every dtype of PyTorch; several tensors in one call; DDP's buffers."""

import pytest
from torch_ranks import starter

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


OTHERS = """
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32]
OTHERS += [torch.uint64, torch.complex32, torch.complex64, torch.complex128]
OTHERS += [getattr(torch, name) for name in dir(torch) if name.startswith("float8")]

def bits(x):
    return x.reshape(-1).view(torch.uint8)

def random(count, dtype, salt=0):
    # A bool is 0 or 1; all other types have any bits.
    generator = torch.Generator().manual_seed(97 * rank + salt)
    most = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, most, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)
"""


@pytest.mark.parametrize("world_size", [3])
def test_broadcast_and_all_gather_of_every_dtype(world_size, ranks):
    ranks(world_size, OTHERS + """
start()
kccl_torch.register(kccl_torch.communicator("cpu"))
assert len(OTHERS) >= 14
for dtype in OTHERS:
    for count in (0, 1, 3, 64, 1001):
        x = random(count, dtype, salt=count)
        everyone = [torch.zeros_like(x) for _ in range(world_size)]
        dist.all_gather(everyone, x)
        whole = torch.zeros(world_size * count, dtype=dtype)
        dist.all_gather_into_tensor(whole, x)
        assert torch.equal(bits(torch.cat(everyone)), bits(whole)), (dtype, count)
        assert torch.equal(bits(everyone[rank]), bits(x)), (dtype, count)
        assert torch.equal(bits(kccl_torch.all_gather(x)), bits(whole))
        for root in range(world_size):
            y = x.clone()
            dist.broadcast(y, root)
            assert torch.equal(bits(y), bits(everyone[root])), (dtype, count, root)
            assert torch.equal(bits(kccl_torch.broadcast(x, root)), bits(y))
# A part of a tensor that begins at an odd address; what lies beside it stays.
x = random(10, torch.uint8)
before = x.clone()
dist.broadcast(x[1:6], 1)
assert torch.equal(x[[0, 6, 7, 8, 9]], before[[0, 6, 7, 8, 9]])
found = [torch.zeros(5, dtype=torch.uint8) for _ in range(world_size)]
dist.all_gather(found, x[1:6])
assert all(torch.equal(each, x[1:6]) for each in found)
say(rank=rank)
""")  # fmt: skip


def test_what_cannot_be_moved_or_reduced_says_so(ranks):
    facts = ranks(2, """
start()
# A type that KCCL does not have.
other = torch.zeros(4, 3, dtype=torch.float8_e4m3fnuz)
z = torch.zeros(4, dtype=torch.complex64)
calls = {
    "strides": lambda: dist.broadcast(other[:, :2], 0),
    "overlap": lambda: dist.broadcast(other[0].expand(4, 3), 0),
    "layout": lambda: dist.broadcast(z.to_sparse(), 0),
    "size": lambda: dist.all_gather_into_tensor(torch.zeros(7, dtype=other.dtype), other[0]),
    "dtype": lambda: dist.all_gather_into_tensor(torch.zeros(6, dtype=torch.uint8), other[0]),
    "order": lambda: kccl_torch.all_reduce(z, "max"),
    "float8": lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fnuz)),
    "complex": lambda: kccl_torch.all_reduce(z.to(torch.complex32)),
}
kccl_torch.register(kccl_torch.communicator("cpu"))
errors = {what: error_of(call) for what, call in calls.items()}
x = filled(4)
dist.all_reduce(x)
assert (x == total).all()
say(rank=rank, **errors)
""")  # fmt: skip
    wanted = {
        "strides": "tensor has shape (4, 2) and strides (3, 1): its elements do not lie one after",
        "overlap": "tensor has shape (4, 3) and strides (0, 1): its elements do not lie one after",
        "layout": "tensor has layout torch.sparse_coo, must be torch.strided",
        "size": "output_tensor has 7 elements of torch.float8_e4m3fnuz, must have 6",
        "dtype": "output_tensor has 6 elements of torch.uint8, must have 6 of torch.float8_e4",
        "order": "complex64, must be a real type, because complex numbers have no order",
        "float8": "torch.float8_e4m3fnuz, must be one of float32, .*reduce x.to(torch.bfloat16)",
        "complex": "torch.complex32, .*reduce x.to(torch.complex64)",
    }
    for fact in facts.values():
        for what, text in wanted.items():
            name, said = fact[what]
            assert name == "InvalidArgument", fact[what]
            assert all(part in said for part in text.split(".*")), said


def test_a_view_that_conjugates_is_refused():
    from kccl.interop.torch_moves import move_in_place

    for dtype in (torch.complex32, torch.complex64):
        x = torch.zeros(4, dtype=dtype).conj()
        refused = pytest.raises(kccl.InvalidArgument, match=r"x is a view that conjugates")
        with kccl.init() as comm, refused:
            move_in_place(comm, x, 0, "x")


def test_types_and_operators_of_pytorch_are_reduced(ranks):
    ranks(2, """
start()
Op = dist.ReduceOp
flags = torch.tensor([True, False, rank == 1])
for op, want in ((Op.SUM, [1, 0, 1]), (Op.MIN, [1, 0, 0]), (Op.BXOR, [0, 0, 1])):
    x = flags.clone()
    dist.all_reduce(x, op=op)
    assert x.tolist() == [bool(each) for each in want], op
for name in ("uint8", "int8", "int16", "uint16", "uint32", "uint64", "int64"):
    x = torch.tensor([6, 3 + rank]).to(getattr(torch, name))
    for op, want in ((Op.BAND, [6, 0]), (Op.BOR, [6, 7]), (Op.MAX, [6, 4]), (Op.SUM, [12, 7])):
        y = x.clone()
        dist.all_reduce(y, op=op)
        assert y.tolist() == want, (name, op)
for name in ("float8_e4m3fn", "float8_e5m2"):
    x = torch.tensor([1.5, 2 * rank]).to(getattr(torch, name))
    dist.all_reduce(x)
    assert x.to(torch.float32).tolist() == [3, 2]
kccl_torch.register(kccl_torch.communicator("cpu"))
for dtype in (torch.complex64, torch.complex128):
    x = torch.tensor([1 + 2j, rank], dtype=dtype)
    # torch.distributed itself refuses products of complex numbers.
    assert kccl_torch.all_reduce(x, "prod").tolist() == [-3 + 4j, 0]
    assert kccl_torch.reduce_scatter(x, "avg").tolist() == [[1 + 2j], [0.5]][rank]
    dist.all_reduce(x)
    assert x.tolist() == [2 + 4j, 1]
say(rank=rank)
""")  # fmt: skip


def test_collectives_of_objects(ranks):
    ranks(3, """
start()
objects = [None] * 3
dist.all_gather_object(objects, {"rank": rank, "text": "x" * (5 * rank + 1)})
assert [each["rank"] for each in objects] == [0, 1, 2] and len(objects[2]["text"]) == 11
given = [{"from": rank}, [rank], None] if rank == 1 else [None] * 3
dist.broadcast_object_list(given, src=1)
assert given == [{"from": 1}, [1], None]
say(rank=rank)
""")  # fmt: skip


def test_one_and_several_tensors_in_one_call(ranks):
    facts = ranks(2, """
import torch.distributed._functional_collectives as functional
start()
world = dist.group.WORLD
for count in (1, 3):
    xs = [filled(each + 2) * (each + 1) for each in range(count)]
    sums = [torch.full_like(x, total * (each + 1)) for each, x in enumerate(xs)]

    def check(found, wanted):
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), (found, wanted)

    def many(x):
        return torch.cat([x / (rank + 1) * (each + 1) for each in range(world_size)])

    ys = [x.clone() for x in xs]
    dist.all_reduce_coalesced(ys)
    check(ys, sums)
    ys = [x.clone() for x in xs]
    with dist._coalescing_manager(async_ops=True) as manager:
        for y in ys:
            dist.all_reduce(y)
    manager.wait()
    check(ys, sums)
    check(functional.all_reduce_coalesced(xs, "sum", world), sums)

    parts = [[torch.zeros_like(x) for x in xs] for _ in range(world_size)]
    dist.all_gather_coalesced(parts, xs)
    for each in range(count):
        check([torch.cat([its[each] for its in parts])], [many(xs[each])])
    outs = [torch.zeros(2 * x.numel()) for x in xs]
    with dist._coalescing_manager():
        for out, x in zip(outs, xs):
            dist.all_gather_into_tensor(out, x)
    check(outs, [many(x) for x in xs])
    check(functional.all_gather_into_tensor_coalesced(xs, world), [many(x) for x in xs])

    outs, ins = [torch.zeros_like(x) for x in xs], [torch.cat([x, x]) for x in xs]
    with dist._coalescing_manager():
        for out, x in zip(outs, ins):
            dist.reduce_scatter_tensor(out, x)
    check(outs, sums)
    check(
        functional.reduce_scatter_tensor_coalesced(ins, "sum", [0] * count, world), sums
    )
error = error_of(lambda: world.allgather_into_tensor_coalesced(outs, xs[:1], None))
say(rank=rank, error=error)
""")  # fmt: skip
    assert facts[0]["error"] == [
        "InvalidArgument",
        "output_tensor has 3 entries and input_tensor 1, must have as many",
    ]


def test_distributed_data_parallel_with_buffers_of_every_dtype(ranks):
    ranks(2, OTHERS + """
start()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        for number, dtype in enumerate(OTHERS):
            self.register_buffer(f"b{number}", random(5, dtype))

    def forward(self, x):
        return self.linear(x)

torch.manual_seed(rank)
model = Model()
parallel = torch.nn.parallel.DistributedDataParallel(model)
for step in range(2):
    # The root's buffers are broadcast before each step.
    for buffer in model.buffers():
        if rank == 1:
            buffer.zero_()
    parallel(filled(1, 3)).sum().backward()
for name, x in model.state_dict().items():
    everyone = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(everyone, x)
    assert torch.equal(bits(everyone[0]), bits(everyone[1])), name
say(rank=rank)
""")  # fmt: skip
