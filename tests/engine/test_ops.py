"""The table of ops, and all that must know each op or each product: nobody may miss one."""

import re
from dataclasses import replace
from inspect import getmembers, isfunction, signature

import pytest
from source_tree import ROOT, without_comments

from kccl.engine.base.core import ffi, lib
from kccl.engine.diff import LIMITS
from kccl.engine.executors.packing import Parts, number_of, panels_for, shape_of
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.model import ops
from kccl.engine.model.ops import KINDS, PRODUCTS, Place, Rows, Vector
from kccl.engine.model.program import Program
from kccl.engine.model.variant import PINS, parse
from kccl.engine.monokernel import layout, weights
from kccl.engine.monokernel.machine import SIMULATED, Machine
from kccl.engine.monokernel.sequence import name_of, sequence_of
from kccl.engine.monokernel.tuning import tuning_for

MODEL = Program(MODELS["tiny-qwen3"])
MIXTURE = Program(MODELS["tiny-gpt-oss"])


def test_a_program_has_each_kind_in_the_order_of_the_table():
    known = set()
    for program, layer in ((MODEL, ops.IN_LAYER), (MIXTURE, ops.IN_MIXTURE)):
        kinds = [op.kind for op in program.ops]
        layers = [kind.name for kind in layer] * program.config.num_layers
        before, behind = (
            [kind.name for kind in KINDS.values() if kind.place is place]
            for place in (Place.BEFORE, Place.BEHIND)
        )
        assert kinds == before + layers + behind
        known |= {*kinds}
    assert known == set(KINDS)


def test_each_op_takes_what_an_op_before_it_gives():
    known = set()
    for program in (MODEL, MIXTURE):
        given = set()
        for op in program.ops:
            takes = KINDS[op.kind].takes
            assert takes is None or takes in given, op.name
            given.add(KINDS[op.kind].gives)
        known |= given
    assert known == set(Vector)


def test_each_tensor_belongs_to_one_op():
    """But the embedding, which is the head, too, if they are tied; and the norm before experts,
    which the router reads, too.
    """
    biased = Program(MODELS["tiny-qwen2"])
    assert biased.config.biases and MODEL.config.has_qk_norm and MODEL.config.is_tied
    assert MIXTURE.config.has_sinks and not MIXTURE.config.is_tied
    for program in (MODEL, biased, Program(MODELS["tiny-laneformer"]), MIXTURE):
        names = [name for op in program.ops for name in (*op.weights, *op.biases)]
        shapes, c = program.config.shapes(), program.config
        assert set(names) == set(shapes)
        assert len(names) - len(shapes) == int(c.is_tied) + c.num_layers * (c.experts is not None)


@pytest.mark.parametrize("program", [MODEL, MIXTURE], ids=["model", "mixture"])
def test_matrices_agree_with_the_vectors_that_ops_take_and_give(program):
    c = program.config
    shapes, made = c.layer_shapes(), {Vector.RESIDUAL: c.hidden}
    chosen = c.experts.chosen if c.experts else 1
    for kind in ops.layer_of(c):
        each = chosen if kind.has_experts else 1
        first = [f"experts.0.{name}" if kind.has_experts else name for name in kind.matrices]
        rows = [shapes[name][-2] for name in first]
        taken = made[kind.takes] // (each if kind.takes is Vector.ACTS else 1)
        assert all(shapes[name][-1] == taken for name in first)
        if kind.is_product:
            assert (kind.rows is Rows.ONE) == (len(kind.matrices) == 1)
            of_product = rows[0] if kind.rows is Rows.IN_TURN else sum(rows)
            assert kind.width(c) == of_product * (each if kind.gives is Vector.ACTS else 1)
            assert len(kind.biases) == len(kind.matrices)
        made[kind.gives] = kind.width(c)


def test_the_reference_has_an_oracle_for_each_op():
    methods = dict(getmembers(Reference, isfunction))
    for kind in KINDS.values():
        assert list(signature(methods[f"_{kind.oracle}"]).parameters)[1:3] == ["op", "run"]


def test_the_host_executor_numbers_each_op():
    by_number = {number_of(op): op.kind for op in (*MODEL.ops, *MIXTURE.ops)}
    assert [by_number[number] for number in range(len(KINDS))] == list(KINDS)
    text = (ROOT / "engine/host/api.inc").read_text()
    (enum,) = re.findall(r"enum KcclEngineKind \{(.*?)\}", text, re.DOTALL)
    assert len(re.findall(r"\w+ = \d+", enum)) == len(KINDS)


def test_the_host_executor_runs_each_op_of_a_layer():
    source = without_comments(ROOT / "engine/host/pass.cpp")
    (run,) = re.findall(r"bool Pass::run\(const Column.*?\n}", source, re.DOTALL)
    for kind in {*ops.IN_LAYER, *ops.IN_MIXTURE}:
        assert f"kKcclEngine{kind.name.title().replace('_', '')}:" in run


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny")])
def test_the_host_executor_sees_the_programs_matrices(name):
    """engine/host/layout.h computes their sizes from those of the model."""
    config = MODELS[name]
    heads = ["replicate", "vocab_parallel"] if config.delay else [config.lm_head]
    for program in (Program(replace(config, lm_head=head)) for head in heads):
        parts = Parts(program, 1)
        model, found = shape_of(program, parts), ffi.new("uint32_t[2]")
        for op in program.ops:
            lib.kccl_engine_matrix(model, number_of(op), found, found + 1)
            kind, (matrices, *_) = KINDS[op.kind], op.products()
            if not kind.is_product:
                assert list(found) == [0, 0], op.name
                continue
            rows, columns = zip(*(program.shapes[each][-2:] for each in matrices), strict=True)
            of_product = sum(rows) // (parts.num_groups if op.kind == "head" else 1)
            panels = panels_for(of_product)
            if kind.rows is Rows.IN_TURN:
                panels = len(rows) * panels_for(rows[0])
            assert list(found) == [panels, columns[0]], op.name


def test_each_op_that_computes_has_limits_above_0():
    for name, limit in LIMITS.items():
        assert (limit.rmse > 0) == (KINDS[name].takes is not None), name


def test_the_monokernels_packer_gets_each_product():
    checkpoint = random_checkpoint("tiny-tiles")
    program = Program(checkpoint.config)
    lanes = program.lanes_of(0, 1)
    pieces = [*layout.pieces(program, 0, 1)]
    found = [read() for read, _ in weights.matrices(checkpoint, program, pieces)]
    of_layers = [
        (PRODUCTS.index(op.kind), op.layer, group)
        for op in program.ops
        if KINDS[op.kind].is_product and op.kind != "head"
        for group in range(len(lanes))
    ]
    head = PRODUCTS.index("head"), program.config.num_layers, 0
    assert [(each.number, each.layer, each.group) for each in pieces] == [*of_layers, head]
    for piece, matrix in zip(pieces, found, strict=True):
        product = piece.product
        columns = product.format.words_of(product.columns * product.lanes)
        assert matrix.shape == (product.rows, columns) and matrix.nbytes == product.nbytes
    assert sum(matrix.nbytes for matrix in found) == layout.total_bytes(program, 0, 1)
    assert max(matrix.nbytes for matrix in found) == layout.most_bytes(program, 1)


@pytest.mark.parametrize("name", ["tiny-laneformer", "tiny-llama", "tiny-qwen2"])
def test_the_monokernel_has_the_programs_ops_in_its_order(name):
    program = Program(MODELS[name])
    tuning = tuning_for(program, 1, Machine(4, kind=SIMULATED))
    text = sequence_of(program, tuning)
    of_layer = [op for op in program.ops if op.name.startswith("layers.0.")]
    rows = re.findall(r"\{Product::k(\w+), Vector::k(\w+), Vector::k(\w+), (\w+)\},", text)
    assert rows == [
        (
            name_of(op.kind) if op.kind in PRODUCTS else "None",
            name_of(KINDS[op.kind].takes.value),
            name_of(KINDS[op.kind].gives.value),
            str(bool(op.biases)).lower(),
        )
        for op in of_layer
    ]
    (numbered,) = re.findall(r"enum class Product : uint32_t \{ (.*?) \}", text)
    assert numbered.split(", ") == [*(f"k{name_of(each)}" for each in PRODUCTS), "kNone"]


def test_each_product_can_be_pinned():
    pins = [parse(pin).ablated for pin in PINS]
    assert [pin.removeprefix("pin:") for pin in PINS] == list(PRODUCTS)
    assert len(set(pins)) == len(pins) and all(pin.bit_count() == 1 for pin in pins)


@pytest.mark.parametrize("layer", [ops.IN_LAYER, ops.IN_MIXTURE], ids=["model", "mixture"])
def test_the_last_product_of_a_module_adds_to_the_residual(layer):
    products = [ops.products_of_module(module, layer) for module in (ops.ATTENTION, ops.MLP)]
    for *others, last in products:
        assert KINDS[last].ends_module and not any(KINDS[name].ends_module for name in others)
    assert [name for each in products for name in each] == [
        kind.name for kind in layer if kind.is_product
    ]
