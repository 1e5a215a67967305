"""The functions of the monokernel's math.cuh are as accurate as they say. decode_math.cpp has them.

Those of targets/math_cuda.cuh are single instructions; tests/hardware/test_decode.py runs them.
"""

import subprocess
from pathlib import Path

import pytest
from compilers import cxx
from source_tree import ROOT

PROGRAM = Path(__file__).with_name("decode_math.cpp")
CSRC = ROOT / "csrc"


@pytest.mark.parametrize("contract", ["off", "fast"])
def test_accuracy(tmp_path, contract):
    """Also where the compiler rounds a product and a sum once."""
    program = tmp_path / "decode_math"
    command = [cxx(), "-std=c++20", "-O2", f"-ffp-contract={contract}", "-march=native"]
    command += ["-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT}", f"-I{CSRC / 'include'}"]
    command += [PROGRAM, CSRC / "host" / "idle.cpp", "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
