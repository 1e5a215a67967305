"""Single instructions on the machine of gcn_machine.py: 64 lanes each, by hand or by clang."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gcn_machine import Launch, Program
from gcn_world import World, compiled

LANES = 64
# Where a snippet finds its inputs and leaves its outputs; 256 bytes of block-shared memory for each
# lane, from v2 on.
INPUT, OUTPUT = 10, 40

Array = "np.ndarray[Any, Any]"

_FRAME = """
snippet:
	s_load_dwordx4 s[4:7], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	v_lshlrev_b32_e32 v2, 8, v0
	s_waitcnt lgkmcnt(0)
{loads}
	s_waitcnt vmcnt(0)
{code}
	s_waitcnt vmcnt(0) lgkmcnt(0)
{stores}
	s_endpgm
	.section	.rodata,"a",@progbits
	.p2align	6, 0x0
	.amdhsa_kernel snippet
		.amdhsa_group_segment_fixed_size 16384
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_kernarg_size 16
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_next_free_vgpr 64
		.amdhsa_next_free_sgpr 64
		.amdhsa_accum_offset 64
		.amdhsa_float_round_mode_32 0
		.amdhsa_float_round_mode_16_64 0
		.amdhsa_float_denorm_mode_32 3
		.amdhsa_float_denorm_mode_16_64 3
	.end_amdhsa_kernel
	.text
"""


def frame(code: str, inputs: int, outputs: int) -> str:
    """Assembly of a kernel that loads v10 and so on, runs the code, and stores v40 and so on."""
    loads = [
        f"\tglobal_load_dword v{INPUT + i}, v1, s[4:5] offset:{4 * LANES * i}"
        for i in range(inputs)
    ]
    stores = [
        f"\tglobal_store_dword v1, v{OUTPUT + i}, s[6:7] offset:{4 * LANES * i}"
        for i in range(outputs)
    ]
    return _FRAME.format(loads="\n".join(loads), stores="\n".join(stores), code=code)


def execute(code: str, inputs: "Sequence[Array]", outputs: int = 1, seed: int = 0) -> "Array":
    """What a snippet leaves: uint32 [outputs, 64].

    Args:
        code: Instructions.
        inputs: Words of 32 bits, [64] each.
        outputs: Number of registers.
        seed: As gcn_machine.run()'s.
    """
    world = World(1)
    given = np.stack([np.asarray(each).view(np.uint32) for each in inputs])
    source = world.array(0, given)
    target = world.array(0, np.zeros((outputs, LANES), np.uint32))
    arguments = np.array([source.ctypes.data, target.ctypes.data], np.uint64).tobytes()
    program = Program(frame(code, len(inputs), outputs))
    report = world.run([Launch(0, program, "snippet", arguments)], seed=seed)
    assert report.finding is None, report.finding
    return target.copy()


def assemble(snippets: Sequence[tuple[str, int, int]], folder: Path) -> str:
    """What clang's assembler says of snippets, (code, inputs, outputs) each; nothing: they are
    right.
    """
    path = folder / "snippets.s"
    texts = [
        frame(*each).replace("snippet", f"snippet{number}") for number, each in enumerate(snippets)
    ]
    path.write_text('\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n' + "".join(texts))
    command = [sys.executable, "-m", "ziglang", "clang", "--target=amdgcn-amd-amdhsa"]
    command += ["-mcpu=gfx942", "-x", "assembler", "-c", str(path), "-o", str(path) + ".o"]
    return subprocess.run(command, capture_output=True, text=True).stderr


def compute(expression: str, inputs: "Sequence[Array]", dtype: Any, seed: int = 0) -> "Array":
    """What clang makes of a C++ expression of `a` and `b`, for each of their elements.

    Args:
        expression: An expression of the type that dtype names.
        inputs: One or two arrays of one dtype, [n], n a multiple of 64.
        dtype: The result's type.
        seed: As gcn_machine.run()'s.
    """
    names = {"float32": "float", "float64": "double", "uint32": "uint32_t", "int32": "int32_t"}
    kind, result = names[inputs[0].dtype.name], names[np.dtype(dtype).name]
    source = f"""#include <kccl/kccl.cuh>
KCCL_KERNEL void each(const {kind}* x, const {kind}* y, {result}* out) {{
    const uint32_t i = kccl::platform::block_in_grid() * 64 + kccl::platform::thread_in_block();
    const {kind} a = x[i], b = y[i];
    (void)b;
    out[i] = {expression};
}}
"""
    world = World(1)
    arrays = [world.array(0, each) for each in (*inputs, *inputs)[:2]]
    out = world.array(0, np.zeros(inputs[0].size, dtype))
    arguments = np.array([each.ctypes.data for each in (*arrays, out)], np.uint64).tobytes()
    program = Program(compiled(source))
    launch = Launch(0, program, program.symbol("_Z4each"), arguments, inputs[0].size // LANES)
    report = world.run([launch], seed=seed)
    assert report.finding is None, report.finding
    return out.copy()
