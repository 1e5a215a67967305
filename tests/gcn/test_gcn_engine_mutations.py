"""Bugs planted in the assembly of the kernel that decodes: each turns it red."""

import re
from functools import cache

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_engine import Decoder
from gcn_mutations import STUCK, Edit, replaced
from long import hunted
from test_gcn_engine import CONTEXT, IDS, MODELS, TUNING, words

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
SEEDS = range(8)
# Attention of the last ones reads the cache.
FEW = IDS[:3]
WRONG, UNAWAITED = r"has wrong logits", r"reads v\d+, which no s_waitcnt waited for"
# Words of the own rank's exchange buffer, and of what ranks send each other.
OWN_STORE = r"^(\tglobal_store_dwordx2 (?:(?!sc0)[^\n])*?) sc1$"
OWN_LOAD = r"^(\tglobal_load_dwordx2 (?:(?!sc0)[^\n])*?) sc1$"
MESSAGE_STORE = r"^(\tglobal_store_dwordx2 [^\n]*?) sc0 sc1$"
MESSAGE_LOAD = r"^(\tglobal_load_dwordx2 [^\n]*?) sc0 sc1$"


def without_barrier(body: str) -> str:
    """Warps do not wait for the first one, which is late to make the block's barriers."""
    late = replaced(r"^(\ts_cbranch_execz \.\w+)$", r"\1" + 4 * "\n\ts_sleep 127", count=1)
    return replaced(r"^\ts_barrier$", "\ts_nop 0")(late(body))


# A mutation: an edit of the kernel, and what the run says then, as a pattern.
MUTATIONS: dict[str, tuple[Edit, str]] = {
    # Scopes
    "vectors are stored without a scope": (replaced(OWN_STORE, r"\1"), STUCK),
    "vectors are loaded without a scope": (replaced(OWN_LOAD, r"\1"), STUCK),
    "messages are stored with agent scope": (replaced(MESSAGE_STORE, r"\1 sc1"), STUCK),
    "messages are loaded with agent scope": (
        replaced(MESSAGE_LOAD, r"\1 sc1"),
        "loads with agent scope what rank",
    ),
    # Waits
    "sums do not wait for other warps' parts": (
        replaced(r"^\ts_waitcnt lgkmcnt\(\d\)\n(\tv_(?:pk_)?add_f32)", r"\ts_nop 0\n\1"),
        UNAWAITED,
    ),
    "matrix units do not wait for keys": (
        replaced(r"^\ts_waitcnt vmcnt\(0\)[^\n]*\n(\tv_mfma_f32_16x16x16_f16)", r"\ts_nop 0\n\1"),
        UNAWAITED,
    ),
    "matrix units do not wait for weights": (
        replaced(r"^\ts_waitcnt vmcnt\(0\)[^\n]*\n(\tv_mfma_f32_16x16x16_bf16)", r"\ts_nop 0\n\1"),
        UNAWAITED,
    ),
    "a wait for all but one of what a poll loads": (
        replaced(r"^\ts_waitcnt vmcnt\(0\)$", "\ts_waitcnt vmcnt(1)"),
        UNAWAITED,
    ),
    "warps begin before the block's barriers are made": (without_barrier, rf"{STUCK}|{WRONG}"),
    # Sums and quotients
    "sums of squares lack half of the lanes": (
        replaced(r"^\tv_mov_b32_dpp (v\d+), v\d+ row_bcast:31 [^\n]*$", r"\tv_mov_b32_e32 \1, 0"),
        WRONG,
    ),
    "tiles and vectors have changed places": (
        replaced(
            r"^(\tv_mfma_f32_16x16x16_bf16 v\[[\d:]+\]), (v\[[\d:]+\]), (v\[[\d:]+\])",
            r"\1, \3, \2",
        ),
        WRONG,
    ),
    "quotients are one unit too large": (
        replaced(r"^(\tv_div_fixup_f32 (v\d+), [^\n]*)$", r"\1\n\tv_add_u32_e32 \2, 1, \2"),
        WRONG,
    ),
}


def outcome(seed: int, edit: Edit = str) -> "tuple[str | None, np.ndarray]":
    """What the machine finds, and the logits of rank 0."""
    decoder = Decoder(MODELS["laneformer"](), 2, TUNING, CONTEXT, edit=edit)
    answer = decoder.score(FEW, seed=seed)
    return answer.report.finding, answer.logits[0]


@cache
def right() -> "np.ndarray":
    finding, logits = outcome(0)
    assert finding is None
    return logits


def test_without_a_bug_every_seed_is_green():
    for seed in SEEDS:
        finding, logits = outcome(seed)
        assert finding is None, f"seed {seed}: {finding}"
        np.testing.assert_array_equal(words(logits), words(right()))


@pytest.mark.parametrize("name", hunted(MUTATIONS))
def test_a_planted_bug_is_found(name):
    edit, finds = MUTATIONS[name]
    for seed in SEEDS:
        finding, logits = outcome(seed, edit)
        if finding is None and not np.array_equal(words(logits), words(right())):
            finding = "has wrong logits"
        if finding is not None:
            assert re.search(finds, finding), finding
            return
    pytest.fail(f"no seed below {SEEDS.stop} finds it")
