"""How the row tiles of a product are cut over blocks: Matrix in kernels/shape.cuh."""

import pytest

import kccl
from kccl.engine.monokernel.launching import KERNELS

# The whole check runs in the compiler. BROKEN is a condition that does not hold.
SOURCE = """
#include "formats/bfloat16.cuh"
#include "shape.cuh"

namespace kccl::decode {

struct Tuned {
    static constexpr uint32_t kWarps = 2, kStageSteps = 1;
    using Formats = FormatList<Bfloat16>;
};

template <uint32_t TILES, uint32_t BLOCKS, uint32_t LONGER>
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
    return next == TILES BROKEN;
}

static_assert(is_cut<6, 3, 0>(), "every block has as many");
static_assert(is_cut<6, 3, 2>(), "nobody is longer");
static_assert(is_cut<7, 3, 0>() && is_cut<7, 3, 1>() && is_cut<7, 3, 2>(), "one is longer");
static_assert(is_cut<8, 3, 0>() && is_cut<8, 3, 1>() && is_cut<8, 3, 2>(), "two, which wrap");
static_assert(is_cut<2, 5, 0>() && is_cut<2, 5, 4>(), "some blocks have none");
static_assert(is_cut<192, 132, 0>() && is_cut<1024, 132, 32>() && is_cut<128, 132, 36>(),
              "Llama-3.2-1B's on one H200");

}  // namespace kccl::decode

KCCL_KERNEL void nothing(uint32_t* out) { *out = 1; }
"""


def test_every_row_tile_has_one_block():
    kccl.compile(SOURCE.replace("BROKEN", ""), ["nothing"], target="sim", include_dirs=[KERNELS])


def test_the_check_can_fail():
    with pytest.raises(kccl.Error, match="every block has as many"):
        kccl.compile(
            SOURCE.replace("BROKEN", "+ 1"), ["nothing"], target="sim", include_dirs=[KERNELS]
        )
