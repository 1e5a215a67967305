"""What runs on NVIDIA's GPUs and what runs on AMD's is one text, but for a few files."""

import re

from gcn_world import INCLUDE
from source_tree import ROOT

# What may differ: threads and blocks, memory, products of matrices, functions.
DIFFERS = {
    "csrc/include/kccl/platform.cuh",
    "csrc/include/kccl/mem.cuh",
    "csrc/include/kccl/targets/mem_cuda.cuh",
    "csrc/include/kccl/targets/mem_hip.cuh",
    "engine/kernels/math.cuh",
    "engine/kernels/targets/math_cuda.cuh",
    "engine/kernels/mma.cuh",
    "engine/kernels/targets/mma_cuda.cuh",
    "engine/kernels/targets/mma_hip.cuh",
    # Attention of 16 queries of a prompt, which runs on NVIDIA's GPUs only.
    "engine/kernels/query_mma.cuh",
    "engine/kernels/targets/query_mma_cuda.cuh",
    "engine/kernels/targets/query_mma_hip.cuh",
    # Products of four warps together, which sm_90a has.
    "engine/kernels/wide_mma.cuh",
    "engine/kernels/targets/wide_mma_cuda.cuh",
    # Numbers of 8 and 4 bits, which NVIDIA's GPUs convert two at a time.
    "engine/kernels/formats/e4m3.cuh",
    "engine/kernels/formats/integers.cuh",
    "engine/kernels/formats/mxfp4.cuh",
    "engine/kernels/formats/nvfp4.cuh",
    "engine/kernels/targets/e4m3_cuda.cuh",
    "engine/kernels/targets/halves_cuda.cuh",
    "engine/kernels/targets/integers_cuda.cuh",
}
TARGET = re.compile(
    r"KCCL_TARGET_(?:CUDA|HIP)|__CUDACC|__HIP|__CUDA_ARCH__|__gfx|amdgcn|\basm\b|kMeetsInHardware|"
    r"\bplatform::k(?:Peels|ExpectsEnd)\b"
)
# Choices that shared code makes by a constant of the target, by file.
BY_CONSTANT = {
    "csrc/include/kccl/kernels/all_reduce_rms_norm.cuh": 2,
    "csrc/include/kccl/meeting.cuh": 1,
    "csrc/include/kccl/payload.cuh": 2,
}
# Lines of code that only one of the two targets has: in files of one target, and in their branches
# of the files above. More is worth a look: it is what a run on one vendor's GPU does not show of
# the other's. Numbers of 8, 6 and 4 bits take some 210 of NVIDIA's lines and 130 of AMD's, sums of
# experts that prefill keeps some 25 of each, attention of 16 queries some 75 of NVIDIA's, and
# products of four warps together some 90.
MOST_LINES = {"cuda": 900, "hip": 530}


def _device_sources():
    for folder in ("csrc/include/kccl", "engine/kernels"):
        for path in sorted((ROOT / folder).rglob("*.cuh")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def _without_comments(text: str) -> list[str]:
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def test_only_the_files_of_targets_know_the_target():
    found = {}
    for name, text in _device_sources():
        num = sum(1 for line in _without_comments(text) if TARGET.search(line))
        if num and name not in DIFFERS and "targets/" not in name:
            found[name] = num
    assert found == BY_CONSTANT


def _lines_of(target: str) -> int:
    """Lines of code of one target: its files, and what its branches have."""
    macro = f"KCCL_TARGET_{target.upper()}"
    num = 0
    for name, text in _device_sources():
        lines = _without_comments(text)
        if name in DIFFERS and f"_{target}.cuh" in name:
            num += len(lines)
        elif name in DIFFERS and "targets/" not in name:
            branches: list[bool] = []
            for line in lines:
                if re.match(r"#\s*if", line):
                    branches.append(macro in line and "!defined" not in line)
                elif re.match(r"#\s*el", line):
                    branches[-1] = macro in line
                elif re.match(r"#\s*endif", line):
                    branches.pop()
                elif any(branches):
                    num += 1
    return num


def test_few_lines_differ():
    lines = {target: _lines_of(target) for target in MOST_LINES}
    total = sum(len(_without_comments(text)) for _, text in _device_sources())
    assert all(lines[target] <= most for target, most in MOST_LINES.items()), lines
    # The share of AMD's own code among all device code.
    assert lines["hip"] < 0.06 * total, (lines, total)


def test_every_header_is_among_those_counted():
    assert (ROOT / "csrc/include/kccl").samefile(INCLUDE / "kccl")
    assert {name for name, _ in _device_sources()} >= DIFFERS
