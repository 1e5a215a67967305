"""How the row tiles of a product are cut over blocks: Matrix in kernels/shape.cuh."""

import subprocess

from compilers import cxx

import kccl
from kccl.engine.monokernel.launching import KERNELS

# The whole check runs in the compiler.
SOURCE = """
#include "formats/bfloat16.cuh"
#include "shape.cuh"

namespace kccl::decode {

struct Tuned {
    static constexpr uint32_t kWarps = 2, kStageSteps = 1;
    using Formats = FormatList<Bfloat16>;
};

// `MORE`: so many tiles more than there are are looked for.
template <uint32_t TILES, uint32_t BLOCKS, uint32_t LONGER, uint32_t MORE = 0>
constexpr bool is_cut() {
    using M = Matrix<Tuned, Bfloat16, TILES * kTileRows, 64, 1, BLOCKS, LONGER>;
    uint32_t next = 0;
    for (uint32_t block = 0; block < BLOCKS; ++block) {
        const Cut tiles = M::tiles_of(block);
        // The blocks with a tile more: so many, from LONGER on, round and round.
        const bool is_longer = (block + BLOCKS - LONGER) % BLOCKS < TILES % BLOCKS;
        if (tiles.first != next || tiles.num != TILES / BLOCKS + is_longer) return false;
        if (tiles.num > M::kMostTiles) return false;
        for (uint32_t i = 0; i < tiles.num; ++i) {
            if (M::owner_of(tiles.first + i) != block) return false;
        }
        next += tiles.num;
    }
    return next == TILES + MORE;
}

static_assert(is_cut<6, 3, 0>(), "every block has as many");
static_assert(!is_cut<6, 3, 0, 1>(), "a tile that nobody has is noticed");
static_assert(is_cut<6, 3, 2>(), "nobody is longer");
static_assert(is_cut<7, 3, 0>() && is_cut<7, 3, 1>() && is_cut<7, 3, 2>(), "one is longer");
static_assert(is_cut<8, 3, 0>() && is_cut<8, 3, 1>() && is_cut<8, 3, 2>(), "two, which wrap");
static_assert(is_cut<2, 5, 0>() && is_cut<2, 5, 4>(), "some blocks have none");
static_assert(is_cut<192, 132, 0>() && is_cut<1024, 132, 32>() && is_cut<128, 132, 36>(),
              "Llama-3.2-1B's on one H200");

}  // namespace kccl::decode
"""


def test_every_row_tile_has_one_block(tmp_path):
    program = tmp_path / "rows.cpp"
    program.write_text(SOURCE)
    command = [cxx(), "-std=c++20", "-fsyntax-only", f"-I{kccl.include_dir()}", f"-I{KERNELS}"]
    done = subprocess.run([*command, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
