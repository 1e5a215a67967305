"""A recipe of engine/README.md, followed in a copy of the tree: a kind of op, which multiplies the
embedding by 4, as Gemma multiplies it by a number of its own.
"""

import re
import shutil
import subprocess
import sys

import pytest
from recipe_tree import Tree, python, rebuild, run
from source_tree import ROOT

# It builds the extension and compiles the monokernel.
pytestmark = [pytest.mark.long, pytest.mark.takes(20)]

ROW = """    OpKind(
        name="scale",
        place=Place.BEFORE,
        oracle="scale",
        takes=Vector.RESIDUAL,
        gives=Vector.RESIDUAL,
        width=lambda c: c.hidden,
    ),
    OpKind(
        name="qkv","""
ORACLE = """    def _scale(self, op: Op, run: _Run, biases: Sequence[Array]) -> Array:
        return run.taken_by(op) * np.float32(4)

    def _qkv("""
CASE = """            case kKcclEngineScale: {
                const Share own = own_columns();
                for (uint32_t k = own.first; k < own.end; ++k) {
                    float* x = residuals() + k * memory_.hidden_stride;
                    std::for_each(x, x + model_.hidden, [](float& value) { value *= 4; });
                }
                break;
            }
            case kKcclEngineQkv:"""
EMBEDDED = """    const auto* const rows = reinterpret_cast<const uint8_t*>(task.embedding);
    Float4 four = S::EmbedFormat::four(rows, uint64_t(token) * (S::kHidden / 4) + index4);
    for (float& value : four.value) value *= 4;
    return four;
"""
# A tiny model with the op, in all executors.
RUNS_IT = """
import numpy as np
import kccl
from kccl.engine import Engine, diff
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.monokernel.shape import Tuning

SMALL = dict(num_layers=2, hidden=32, head_dim=16, vocab_size=64, context=16, ffn=32, num_heads=2,
             num_kv_heads=2, num_lanes=2)
TUNING = Tuning(blocks=1, warps=1, stages=4, stage_steps=1, in_flight=2, kv_strands=2, kv_splits=1)
IDS = [5, 9, 17]
model = random_checkpoint("tiny-llama", **SMALL)
trace = Reference(model).trace(IDS)
assert list(trace)[:2] == ["embed", "scale"]
assert (trace["scale"] == 4 * trace["embed"]).all() and trace["embed"].any()
wanted = trace["head"][0]

def decoded(comm):
    executor = DeviceExecutor(model, comm, tuning=TUNING, context=16)
    logits = np.empty((len(IDS), 64), np.float32)
    executor.start_scoring(IDS, logits, writes_shared=True)
    executor.wait()
    executor.close()
    return logits

(found,) = kccl.run_threads(decoded, 1, backend="sim")
assert np.abs(found - wanted).max() < 1e-2, np.abs(found - wanted).max()
with Engine(model, ranks=2, tokenizer=False) as engine:
    assert np.abs(engine.logits(IDS) - wanted).max() < 1e-2
    chosen = engine.generate(IDS, max_tokens=8, temperature=0, stop_ids=()).ids
with Engine(model, "sim", tokenizer=False) as engine:
    # Its prompt runs through prefill, and its tokens through decode.
    assert engine.generate(IDS, max_tokens=8, temperature=0, stop_ids=()).ids == chosen
print("right")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = Tree(tmp_path_factory.mktemp("recipe") / "kccl")
    for file in (ROOT / "kccl").glob("*.so"):
        shutil.copy(file, tree.folder / "kccl")
    tree.touched()
    tree.change("engine/model/ops.py", ('    OpKind(\n        name="qkv",', ROW))
    tree.change("engine/executors/reference.py", ("    def _qkv(", ORACLE))
    return tree


@pytest.fixture(scope="module")
def whole(tree):
    """The tree with all steps of the recipe, built; and the files that they edit and add."""
    api = "engine/host/api.inc"
    enum = tree.text(api).split("KcclEngineKind {")[1].split("}")[0]
    lines = re.findall(r"    kKcclEngine\w+ = \d+,?\n", enum)
    kinds = [re.findall(r"\w+", line)[0] for line in lines]
    kinds.insert(1, "kKcclEngineScale")
    numbered = ",\n".join(f"    {kind} = {number}" for number, kind in enumerate(kinds))
    tree.change(api, ("".join(lines), f"{numbered}\n"))
    tree.change("engine/host/pass.cpp", ("            case kKcclEngineQkv:", CASE))
    vectors = "engine/kernels/vectors.cuh"
    (body,) = re.findall(r"Float4 embedded\(.*?\{\n(.*?)\}\n", tree.text(vectors), re.DOTALL)
    tree.change(vectors, (body, EMBEDDED))
    touched = tree.touched()
    rebuild(tree)
    return tree, touched


def test_a_missing_step_is_named(tree):
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine/test_ops.py")
    done = subprocess.run([sys.executable, *tests], cwd=tree.folder, capture_output=True, text=True)
    assert done.returncode != 0 and "kKcclEngineScale" in done.stdout


def test_all_executors_run_the_op(whole):
    tree, _ = whole
    assert python(tree, RUNS_IT).split()[-1] == "right"
    assert " passed" in run(tree, sys.executable, "-m", "pytest", "-q", "tests/engine/test_ops.py")


def test_the_recipe_names_what_was_touched(whole):
    text = (ROOT / "engine/README.md").read_text()
    recipe = text.split("## Adding a kind of op\n")[1].split("\n## ")[0]
    edited, added = whole[1]
    assert len(edited) == 5 and not added
    for file in edited:
        assert f"`{file.removeprefix('engine/')}`" in recipe, file
