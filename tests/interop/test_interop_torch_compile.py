"""kccl.interop.torch's functions, alone and under torch.compile, with tensors on the host."""

import shutil

import pytest
from torch_ranks import starter

import kccl

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(tmp_path):
    return starter(tmp_path, "cpu")


@pytest.mark.parametrize("compiler", ["", "inductor"])
def test_functions(compiler, ranks):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    program = """
start()
kccl_torch.register(kccl_torch.communicator("cpu"))
kccl_torch.register(kccl_torch.communicator("cpu", dist.new_group()), "second")

def functional(x):
    y = kccl_torch.all_reduce(x * 2) + 1
    return y, kccl_torch.all_reduce(y, op="max", comm="second"), kccl_torch.broadcast(x, root=1)

def in_place(x):
    x = x + 1
    kccl_torch.all_reduce_(x, op="avg")
    y = x * 2
    assert kccl_torch.broadcast_(y, root=0, comm="second") is y
    return x, y

if os.environ["COMPILER"]:
    how = dict(fullgraph=True, backend=os.environ["COMPILER"])
    functional, in_place = torch.compile(functional, **how), torch.compile(in_place, **how)
for turn in range(3):
    x = filled(4, 6) + turn
    y, largest, from_root = functional(x)
    want = 2 * (total + turn * world_size) + 1
    assert (y == want).all() and (largest == want).all() and (from_root == 2 + turn).all()
    assert (x == rank + 1 + turn).all()
    x, y = in_place(x)
    assert (x == total / world_size + turn + 1).all() and torch.equal(y, 2 * x)
# The result is C-contiguous, although the input is not.
y, *_ = functional(filled(6, 4).t())
assert y.is_contiguous() and (y == 2 * total + 1).all()
say(rank=rank)
"""
    ranks(2, program, COMPILER=compiler)


def test_functions_that_change_the_shape(ranks):
    ranks(2, """
start()
kccl_torch.register(kccl_torch.communicator("cpu"))

def both(x):
    y = kccl_torch.all_gather(x * 2)
    return y, kccl_torch.reduce_scatter(y.view(-1, 3) + 1)

for call in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
    y, part = call(filled(2, 3))
    assert y.shape == (2, 2, 3) and (y[0] == 2).all() and (y[1] == 4).all()
    assert part.shape == (2, 3) and (part == 2 * (2 * (rank + 1) + 1)).all()
name, text = error_of(lambda: kccl_torch.reduce_scatter(filled(3)))
assert name == "InvalidArgument" and "multiple of 2" in text
say(rank=rank)
""")  # fmt: skip


def test_torch_compile_takes_torch_distributed_too(ranks):
    ranks(2, """
start()
def f(x):
    x = x * 2
    dist.all_reduce(x)
    return x + 1

assert (torch.compile(f, fullgraph=True, backend="aot_eager")(filled(4)) == 2 * total + 1).all()
say(rank=rank)
""")  # fmt: skip


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_torch_compile_of_distributed_data_parallel(where, ranks):
    """Dynamo does not trace into the group, which DDP calls while the compiled model runs."""
    ranks(2, """
start()
torch.manual_seed(rank)

def compiled(model):
    return torch.compile(model, backend="aot_eager")

model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
# One is run as it is, to compare.
plain = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
parallel = torch.nn.parallel.DistributedDataParallel
tested = compiled(parallel(model)) if WHERE == "outside" else parallel(compiled(model))
for step in range(4):
    torch.manual_seed(10 * step + rank)
    x, grads = torch.rand(5, 3), []
    for each in (plain, tested):
        each.zero_grad()
        each(x).square().sum().backward()
        grads.append([parameter.grad for parameter in each.parameters()])
    for wanted, found in zip(*grads, strict=True):
        assert torch.allclose(wanted, found, atol=1e-5), (step, wanted, found)
say(rank=rank)
""".replace("WHERE", repr(where)).replace("start()", "import copy\nstart()", 1))  # fmt: skip


def test_torch_compile_of_a_step_with_barriers_and_handles(ranks):
    ranks(2, """
start()

def step(x):
    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    return torch.stack(parts) + 1

for _ in range(3):
    found = torch.compile(step, backend="aot_eager")(filled(3))
    assert (found == total + 1).all()
say(rank=rank)
""")  # fmt: skip


@pytest.fixture
def alone():
    """A communicator of one rank, registered as "alone"."""
    from kccl.interop import torch as kccl_torch

    with kccl.init() as comm:
        kccl_torch.register(comm, "alone")
        yield kccl_torch
        kccl_torch.unregister("alone")


def test_ops_pass_torch_librarys_opcheck(alone):
    for x in (torch.ones(3, 5), torch.ones(3, 5).t(), torch.ones((), dtype=torch.bfloat16)):
        torch.library.opcheck(torch.ops.kccl.all_reduce.default, (x, "sum", "alone"))
        torch.library.opcheck(torch.ops.kccl.broadcast.default, (x, 0, "alone"))
    for x in (torch.ones(3, 5), torch.ones(0)):
        torch.library.opcheck(torch.ops.kccl.all_reduce_.default, (x, "max", "alone"))
        torch.library.opcheck(torch.ops.kccl.broadcast_.default, (x, 0, "alone"))
    x = torch.ones(2, 3)
    torch.library.opcheck(torch.ops.kccl.all_gather.default, (x, "alone"))
    torch.library.opcheck(torch.ops.kccl.reduce_scatter.default, (x, "sum", "alone"))


def test_names_of_communicators(alone):
    x = torch.ones(3)
    with pytest.raises(kccl.Error, match=r"registered as 'default', registered are: 'alone'"):
        alone.all_reduce(x)
    with pytest.raises(Exception, match=r"registered as 'other'"):
        torch.compile(alone.all_reduce, fullgraph=True, backend="aot_eager")(x, comm="other")
    assert torch.equal(alone.all_reduce(x, comm="alone"), x)
    with kccl.init() as other:
        with pytest.raises(kccl.InvalidArgument, match="another communicator is registered"):
            alone.register(other, "alone")
        alone.unregister("alone")
        alone.unregister("alone")
        alone.register(other, "alone")
        alone.register(other, "alone")
        assert torch.equal(alone.all_reduce(x, comm="alone"), x)
    with pytest.raises(kccl.Error, match="closed"):
        alone.all_reduce(x, comm="alone")


def test_a_gradient_is_refused(alone):
    x = torch.ones(3, requires_grad=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="autograd"):
        alone.all_reduce(x, comm="alone").sum().backward()


@pytest.mark.parametrize("compiler", ["", "aot_eager"])
def test_normalised_rows(compiler, ranks):
    """One call gives the bits of three, as a new tensor and in place, and in 8 bits."""
    program = """
from contextlib import nullcontext
from torch._subclasses import FakeTensorMode
start()
kccl_torch.register(kccl_torch.communicator("cpu"))
weight = torch.linspace(0.5, 1.5, 96).bfloat16()
scale = torch.tensor(0.02)

def functional(x, residual):
    return kccl_torch.all_reduce_rms_norm(x, residual, weight, 1e-6)

def of_8_bits(x, residual):
    return kccl_torch.all_reduce_rms_norm(x, residual, weight, 1e-6, scale)[0]

def in_place(x, residual):
    x, residual = x + 0, residual + 0
    kccl_torch.all_reduce_rms_norm_(x, residual, weight, 1e-6)
    return x, residual

def step_by_step(x, residual):
    residual = (kccl_torch.all_reduce(x).float() + residual.float()).bfloat16()
    return kccl_torch.rms_norm(residual, weight, 1e-6), residual

calls = functional, in_place, of_8_bits
if os.environ["COMPILER"]:
    how = dict(fullgraph=True, backend=os.environ["COMPILER"])
    calls = [torch.compile(call, **how) for call in calls]
for seed in range(2):
    torch.manual_seed(seed)
    residual = torch.randn(3, 96).bfloat16()
    x = torch.randn(3, 96).bfloat16() * (rank + 1)
    want, total = step_by_step(x, residual)
    for call in calls[:2]:
        found = call(x, residual)
        assert torch.equal(found[0], want) and torch.equal(found[1], total)
    small = calls[2](x, residual)
    assert small.dtype == torch.float8_e4m3fn
    assert torch.allclose(small.float() * scale, want.float(), rtol=0.07, atol=0.01)
    # They are one unit in the last place apart at most.
    torchs = torch.nn.functional.rms_norm(total, (96,), weight, 1e-6)
    assert (want.view(torch.int16).int() - torchs.view(torch.int16).int()).abs().max() <= 1

def of_parts(x, residual):
    return kccl_torch.reduce_scatter_rms_norm(x, residual, weight, 1e-6)

if os.environ["COMPILER"]:
    of_parts = torch.compile(of_parts, **how)
x, residual = x.repeat(2, 1)[:4], residual.repeat(2, 1)[:4]
mine = slice(2 * rank, 2 * rank + 2)
want = functional(x, residual)
for found, whole in zip(of_parts(x, residual[mine]), want):
    assert torch.equal(found, whole[mine])

# A residual of another shape is refused, when the call is traced as well.
for where in (FakeTensorMode(), nullcontext()):
    with where:
        given = torch.ones(2, 96), torch.ones(192), torch.ones(96), 1e-6
        name, told = error_of(lambda: kccl_torch.all_reduce_rms_norm(*given))
    assert name == "InvalidArgument" and "residual has shape (192,), x has (2, 96)" in told, told

checks = "test_schema", "test_faketensor", "test_autograd_registration"
torch.library.opcheck(torch.ops.kccl.rms_norm.default, (x, weight, 1e-6), test_utils=checks)
for change, text in (({"weight": weight[:8]}, "weight has 8 elements"), ({"eps": -1.0}, "eps is")):
    given = dict(x=x, residual=residual, weight=weight, eps=1e-6) | change
    parts = given | dict(residual=given["residual"][mine])
    for call, each in ((kccl_torch.all_reduce_rms_norm, given),
                       (kccl_torch.all_reduce_rms_norm_, given),
                       (kccl_torch.reduce_scatter_rms_norm, parts)):
        name, told = error_of(lambda: call(**each))
        assert name == "InvalidArgument" and text in told
        try:
            call(**each)
            raise AssertionError("refused nothing")
        except RuntimeError:  # what PyTorch's own functions raise
            pass
say(rank=rank)
"""
    ranks(2, program, COMPILER=compiler)
