"""Programs for aarch64: compiled by the ziglang wheel's clang, and run by QEMU or by this machine.

They are static, with musl, so that they need no library of an aarch64 machine.
"""

import platform
import shutil
import subprocess
import sys

import pytest

# Before Zig first links such a program, it compiles its C++ library for aarch64. That took
# 300 s of CPU time on an AMD EPYC, and stays in Zig's cache.
_FIRST_LINK_S = 900
CXX = (sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-target", "aarch64-linux-musl")


def make_linkable(folder):
    """Lets Zig compile what it links programs with, which no test's limit covers."""
    source = folder / "empty.cpp"
    source.write_text("int main() {}\n")
    command = [*CXX, "-pthread", source, "-o", folder / "empty"]
    subprocess.run(command, check=True, timeout=_FIRST_LINK_S)


def run(program, *words):
    """What a program did with these words. Without QEMU the test is skipped."""
    launcher = []
    if platform.machine() != "aarch64":
        found = [name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)]
        launcher = found[:1] or pytest.skip("no qemu-aarch64: apt-get install qemu-user")
    return subprocess.run([*launcher, program, *words], capture_output=True, text=True)
