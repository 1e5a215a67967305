"""A recipe of engine/README.md, followed in a copy of the tree: a format of weights, which is BF16
with its bytes swapped.
"""

import re
import shutil
import subprocess

import pytest
from compilers import cxx
from recipe_tree import Tree, python
from source_tree import ROOT

# It compiles the monokernel and the host executor's products.
pytestmark = [pytest.mark.long, pytest.mark.takes(30)]

TABLE, HOST_TABLE = "engine/formats/table.py", "engine/host/formats/table.h"
PYTHON_TWIN = '''"""BF16 with its bytes swapped."""

from .base import Format
from .bfloat16 import BFLOAT16


class Swapped(Format):
    name, in_files = "swapped", "BF16S"
    word, tile_bytes = BFLOAT16.word, BFLOAT16.tile_bytes

    def to_float32(self, words):
        return BFLOAT16.to_float32(words.byteswap())

    def from_values(self, values):
        return BFLOAT16.from_values(values).byteswap()


SWAPPED = Swapped()
'''
KERNEL_TWIN = """// BF16 with its bytes swapped.
#pragma once

#include "plain16.cuh"

namespace kccl::decode {

struct Swapped : Plain16<bf16> {
    KCCL_DEVICE static uint16_t turned(uint64_t bits) {
        return static_cast<uint16_t>((bits & 0xff) << 8 | (bits >> 8 & 0xff));
    }

    KCCL_DEVICE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        const auto* const values = reinterpret_cast<const uint16_t*>(rows);
        for (uint32_t at = warp().index(); at < kTileRows * kTileColumns; at += warp().size()) {
            const uint32_t in_tile = at / kTileColumns, within = at % kTileColumns;
            const uint64_t from = (row + in_tile) * columns + first + within;
            const uint16_t value = within < num ? turned(mem::load_plain(values + from)) : 0;
            auto* const to = reinterpret_cast<uint16_t*>(tile + Mma<bf16>::offset(in_tile, within));
            mem::store_plain(to, value);
        }
    }

    KCCL_DEVICE static Float4 four(const uint8_t* rows, uint64_t i) {
        const uint64_t four = mem::load_plain(reinterpret_cast<const uint64_t*>(rows) + i);
        Float4 values;
        for (int k = 0; k < 4; ++k) {
            values.value[k] = Element<bf16>::widen({turned(four >> 16 * k)});
        }
        return values;
    }
};

}  // namespace kccl::decode
"""
HOST_TWIN = """// BF16 with its bytes swapped.
#pragma once

#include "bfloat16.h"

namespace kccl::engine {

struct Swapped : Bfloat16 {
    static constexpr const char* kName = "swapped";

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        for (uint32_t row = 0; row < num_rows; ++row) {
            for (uint32_t column = 0; column < num_columns; ++column) {
                const uint8_t* from = rows + row * stored_bytes(num_columns) + 2 * column;
                uint8_t* to = panel + column / 2 * kPieceBytes + row * kRowBytes + column % 2 * 2;
                to[0] = from[1];
                to[1] = from[0];
            }
        }
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t turned[] = {stored[2 * i + 1], stored[2 * i]};
            Bfloat16::widen(turned, 1, out + i);
        }
    }
};

}  // namespace kccl::engine
"""
# A model with some products in the new format, and the same model in BF16: the same numbers.
RUNS_IT = """
import numpy as np
import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.swapped import SWAPPED
from kccl.engine.monokernel.shape import Tuning

NAMES = ("wo", "w1", "w3", "embedding")
SMALL = dict(num_layers=1, hidden=32, head_dim=16, vocab_size=64, context=16, ffn=32, num_heads=2,
             num_kv_heads=2, num_lanes=2)
TUNING = Tuning(blocks=1, warps=1, stages=4, stage_steps=1, in_flight=2, kv_strands=2, kv_splits=1)
IDS = [5, 9, 17]

usual = random_checkpoint("tiny-llama", **SMALL)
made = random_checkpoint("tiny-llama", **SMALL, stored=dict.fromkeys(NAMES, "swapped")).as_stored()
assert {kind for kind, each in made.formats.items() if each is SWAPPED} == {
    "out", "gate_up", "embed", "head"
}
wanted = Reference(usual).logits(IDS)
assert (Reference(made).logits(IDS) == wanted).all()

def main(comm, checkpoint):
    executor = DeviceExecutor(checkpoint, comm, tuning=TUNING, context=16)
    logits = np.empty((len(IDS), 64), np.float32)
    executor.start_scoring(IDS, logits, writes_shared=True)
    executor.wait()
    executor.close()
    return logits

found = [kccl.run_threads(lambda comm: main(comm, each), 1, backend="sim")[0]
         for each in (usual, made)]
assert (found[0] == found[1]).all()
assert np.abs(found[0] - wanted).max() < 1e-2, np.abs(found[0] - wanted).max()
print("right")
"""
# The host executor's products, without the rest of the extension.
MULTIPLIES_IT = """
#include <cstdio>
#include <cstring>
#include <vector>
#include "engine/host/compute.h"
extern "C" const char* kccl_host_instruction_set() { return "baseline"; }
int main() {
    using namespace kccl::engine;
    const int number = kccl_engine_format("swapped");
    const uint32_t columns = 5, rows = 18;
    std::vector<uint8_t> stored(rows * columns * 2);
    std::vector<float> values(rows * columns), x(6, 1.0f), out(kGroup * kPanels * kRows);
    for (uint32_t i = 0; i < rows * columns; ++i) stored[2 * i] = 0x3f, stored[2 * i + 1] = 4 * i;
    kFormats[number].widen(stored.data(), rows * columns, values.data());
    std::vector<uint8_t> panels(2 * kccl_engine_panel_bytes(number, columns));
    kccl_engine_pack(number, panels.data(), stored.data(), rows, columns, 1);
    x[5] = 0;
    compute().multiply[number](panels.data(), 2, 3, x.data(), 6, 1, out.data());
    for (uint32_t row = 0; row < rows; ++row) {
        float even = 0, odd = 0;
        for (uint32_t k = 0; k < columns; ++k) (k % 2 ? odd : even) += values[row * columns + k];
        if (out[row] != even + odd || even == 0) return 1;
    }
    puts("right");
}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = Tree(tmp_path_factory.mktemp("recipe") / "kccl")
    for file in (ROOT / "kccl").glob("*.so"):
        shutil.copy(file, tree.folder / "kccl")
    tree.touched()
    for file, text in (
        ("engine/formats/swapped.py", PYTHON_TWIN),
        ("engine/kernels/formats/swapped.cuh", KERNEL_TWIN),
        ("engine/host/formats/swapped.h", HOST_TWIN),
    ):
        (tree.folder / file).write_text(text)
    tree.change(
        TABLE,
        ("from .q8_0 import Q8_0\n", "from .q8_0 import Q8_0\nfrom .swapped import SWAPPED\n"),
        ("    *EXPANDED,\n", "    *EXPANDED,\n    SWAPPED,\n"),
    )
    tree.change(
        HOST_TABLE,
        ('#include "q8_0.h"\n', '#include "q8_0.h"\n#include "swapped.h"\n'),
        ("    CASE(Q4_1)", "    CASE(Q4_1) CASE(Swapped)"),
    )
    return tree


def test_the_recipe_names_what_was_touched(tree):
    text = (ROOT / "engine/README.md").read_text()
    recipe = text.split("## Adding a format\n")[1].split("\n## ")[0]
    steps = "".join(line for line in recipe.splitlines(True) if re.match(r"\d\.|   ", line))
    named = {
        f"engine/{each.replace('NAME', 'swapped')}"
        for each in re.findall(r"`([\w/]+\.\w+)`", steps)
    }
    edited, added = tree.touched()
    assert edited == {TABLE, HOST_TABLE} and len(added) == 3
    # It also names the file that says what a device twin must have.
    assert named == edited | added | {"engine/kernels/format.cuh"}


def test_reference_and_monokernel_run_the_format(tree):
    assert python(tree, RUNS_IT).split()[-1] == "right"


def test_the_host_multiplies_the_format(tree, tmp_path):
    (tmp_path / "program.cpp").write_text(MULTIPLIES_IT)
    host = tree.folder / "engine/host"
    flags = ["-std=c++20", "-O0", "-ffp-contract=off", "-mavx2", "-mf16c", "-mfma", "-Wno-psabi"]
    includes = [f"-I{tree.folder / 'kccl'}", f"-I{tree.folder}", f"-I{host}"]
    baseline = [flag for flag in flags if not flag.startswith("-m")]
    avx512 = [*flags, "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    objects = []
    for source, own in (
        (tmp_path / "program.cpp", baseline),
        (host / "compute.cpp", baseline),
        (host / "compute_baseline.cpp", baseline),
        (host / "compute_x86_64_v3.cpp", [*flags, "-mbmi2"]),
        (host / "compute_x86_64_v4.cpp", avx512),
        (host / "compute_x86_64_vnni.cpp", [*avx512, "-mavx512vnni"]),
    ):
        objects.append(tmp_path / f"{source.stem}.o")
        command = [cxx(), *own, *includes, "-c", source, "-o", objects[-1]]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    subprocess.run([cxx(), *objects, "-o", tmp_path / "program"], check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n")
