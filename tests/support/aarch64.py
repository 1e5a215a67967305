"""Programs for aarch64: compiled by the ziglang wheel's clang, and run by QEMU or by this machine.

They are static, with musl, so that they need no library of an aarch64 machine.
"""

import platform
import shutil
import subprocess
import sys

import pytest

CXX = (sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-target", "aarch64-linux-musl")


def run(program, *words):
    """What a program did with these words. Without QEMU the test is skipped."""
    launcher = []
    if platform.machine() != "aarch64":
        found = [name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)]
        launcher = found[:1] or pytest.skip("no qemu-aarch64: apt-get install qemu-user")
    return subprocess.run([*launcher, program, *words], capture_output=True, text=True)
