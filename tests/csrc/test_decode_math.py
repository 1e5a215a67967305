"""The functions of the monokernel's math.cuh are as accurate as it says (decode_math.cpp).

On NVIDIA's GPUs each of these functions of floats is one instruction (targets/math_cuda.cuh). The
tests in tests/hardware/test_decode.py run these instructions, and do not measure their accuracy.
"""

import platform
import subprocess
from pathlib import Path

import pytest
from compilers import cxx
from long import long_after
from source_tree import ROOT

PROGRAM = Path(__file__).with_name("decode_math.cpp")
CSRC = ROOT / "csrc"


def flags_of(rounding):
    if rounding == "twice":
        return ["-ffp-contract=off"]
    if platform.machine() != "x86_64":
        return ["-ffp-contract=fast"]
    if "fma" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this CPU has no FMA")
    return ["-ffp-contract=fast", "-mfma"]


@pytest.mark.parametrize("rounding", long_after(1, ["twice", "once"]))
def test_accuracy(tmp_path, rounding):
    """Compilers may round a product and a sum once."""
    program = tmp_path / "decode_math"
    command = [cxx(), "-std=c++20", "-O2", *flags_of(rounding), "-Wall", "-Wextra", "-Werror"]
    command += ["-pthread", f"-I{ROOT}", f"-I{CSRC / 'include'}"]
    command += [PROGRAM, CSRC / "host" / "idle.cpp", "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
