"""How the monokernel chooses experts by their logits, simulated: as model/experts.py does."""

import numpy as np
import pytest
from long import long_after

import kccl
from kccl.engine.model.experts import Experts
from kccl.engine.monokernel.launching import KERNELS

SOURCE = """
#include "choose_experts.cuh"

namespace kccl::decode {

struct Model {
    static constexpr uint32_t kExperts = EXPERTS, kPlaces = PLACES;
    static constexpr bool kNormalisesShares = IS_NORMALISED, kHasExperts = true;
};

}  // namespace kccl::decode

// One warp for each position.
KCCL_KERNEL void choose(uint32_t* experts, float* shares, const float* logits) {
    using namespace kccl::decode;
    constexpr uint32_t kFloat4s = (EXPERTS + 3) / 4, kWarp = kccl::platform::kWarpSize;
    constexpr uint32_t kEach = (kFloat4s + kWarp - 1) / kWarp;
    auto* const choice = reinterpret_cast<ExpertChoice<Model>*>(kccl::platform::dynamic_shared());
    const uint32_t position = kccl::platform::block_in_grid(), thread = kccl::warp().index();
    Float4 float4s[kEach] = {};
    for (uint32_t k = 0; k < kEach; ++k) {
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t expert = (thread + k * kWarp) * 4 + i;
            if (expert < EXPERTS) float4s[k].value[i] = logits[position * EXPERTS + expert];
        }
    }
    choose_experts(float4s, choice);
    kccl::warp().sync();
    if (thread >= PLACES) return;
    experts[position * PLACES + thread] = kccl::mem::load_plain(&choice->expert[thread]);
    shares[position * PLACES + thread] = kccl::mem::load_plain(&choice->share[thread]);
}
"""


def choose(logits, experts, warp_size):
    source = SOURCE.replace("IS_NORMALISED", str(experts.is_normalised).lower())
    for name, number in (("EXPERTS", experts.num), ("PLACES", experts.chosen)):
        source = source.replace(name, str(number))

    def main(comm):
        places = len(logits), experts.chosen
        chosen, shares = comm.empty(places, "uint32"), comm.empty(places, "float32")
        given = comm.empty(logits.shape, "float32")
        given[...] = logits
        module = kccl.compile(
            source, ["choose"], target="sim", warp_size=warp_size, include_dirs=[KERNELS]
        )
        module.kernel("choose")(
            *(comm, chosen.ctypes.data, shares.ctypes.data, given.ctypes.data),
            **{"grid": len(logits), "block": warp_size, "shared_bytes": 1024},
        )
        return chosen.copy(), shares.copy()

    (result,) = kccl.run_threads(main, 1, backend="sim", warp_size=warp_size)
    return result


@pytest.mark.parametrize(
    ("experts", "warp_size"),
    long_after(
        3,
        [
            (Experts(num=128, chosen=4), 32),
            (Experts(num=20, chosen=3, is_normalised=False), 64),
            # Several float4s of a thread, the last one not whole.
            (Experts(num=262, chosen=32), 32),
            (Experts(num=1, chosen=1), 64),
        ],
    ),
    ids=str,
)
def test_the_choice_is_that_of_the_model(experts, warp_size):
    random = np.random.default_rng(experts.num)
    logits = random.normal(size=(6, experts.num)).astype(np.float32) * 3
    # Many logits are equal, and all of them are.
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, 1:2] = -np.inf
    found, shares = choose(logits, experts, warp_size)
    ids, wanted = experts.choose(logits)
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_allclose(shares, wanted, rtol=2e-6, atol=1e-30)


def test_a_logit_that_is_no_number_makes_all_shares_none():
    logits = np.zeros((3, 20), np.float32)
    logits[0, 7] = np.nan
    # NaN is equal to minus infinity: of those the lower numbers are chosen.
    logits[2] = -np.inf
    logits[2, [1, 5]] = np.nan
    logits[2, 9] = 1
    ids, shares = choose(logits, Experts(num=20, chosen=3), 32)
    assert np.isnan(shares[[0, 2]]).all() and not np.isnan(shares[1]).any()
    np.testing.assert_array_equal(ids, [[0, 1, 2], [0, 1, 2], [0, 1, 9]])
