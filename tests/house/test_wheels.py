"""The wheels of `make wheel`, for every Linux on x86_64 and aarch64: what their core needs. That of
this machine is installed into a new environment, and used. `make wheel` runs these tests, because
two cores take minutes to compile what they need.
"""

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from kccl.base.abi import ffi, lib

# The folder of the wheels.
DIST = os.environ.get("WHEELS")
pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(DIST is None, reason="`make wheel` builds the wheels"),
]

MACHINES = ("x86_64", "aarch64")
# The C library's files.
NEEDED = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-[\w-]+\.so\.\d")
NEWEST_GLIBC = (2, 28)

# As `make wheel` calls it.
PYTHON = Path(sys.executable).with_name("python")

USE = """
import json

import numpy as np

import kccl
from kccl.base.abi import ffi, lib


def main(comm):
    x = np.full(5, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    return x.tolist()


print(json.dumps({
    "package": kccl.__file__,
    "results": kccl.run_threads(main, world_size=2),
    "simulated": kccl.run_threads(main, world_size=2, backend="sim"),
    "instructions": ffi.string(lib.kccl_host_instruction_set()).decode(),
}))
"""


@pytest.fixture(scope="module")
def wheels():
    """The wheels by their machines."""
    return {machine: next(Path(DIST).glob(f"*_{machine}.whl")) for machine in MACHINES}


@pytest.fixture(scope="module", params=MACHINES)
def core(request, wheels):
    """The machine, and the extension of its wheel."""
    with zipfile.ZipFile(wheels[request.param]) as archive:
        yield request.param, ELFFile(archive.open("kccl/_core.abi3.so"))


@pytest.mark.parametrize("machine", MACHINES)
def test_the_name_says_what_a_wheel_runs_on(machine, wheels):
    name = rf"kccl-[\d.]+-cp311-abi3-manylinux_2_28_{machine}\.whl"
    assert re.fullmatch(name, wheels[machine].name)


def test_the_wheels_hold_the_same_files(wheels):
    first, second = (set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels.values())
    assert first == second
    assert "kccl/comm.py" in first


def test_the_core_is_for_its_machine(core):
    machine, elf = core
    assert elf["e_machine"] == f"EM_{machine.upper()}"


def test_the_core_needs_only_an_old_enough_c_library(core):
    _, elf = core
    needed = [
        tag.needed
        for section in elf.iter_sections()
        if isinstance(section, DynamicSection)
        for tag in section.iter_tags("DT_NEEDED")
    ]
    assert needed and all(NEEDED.fullmatch(name) for name in needed), needed
    versions = [
        auxiliary.name
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for _, auxiliaries in section.iter_versions()
        for auxiliary in auxiliaries
    ]
    assert versions
    for version in versions:
        numbers = re.fullmatch(r"GLIBC_([\d.]+)", version)
        assert numbers, version
        assert tuple(map(int, numbers[1].split("."))) <= NEWEST_GLIBC, version


def test_the_core_shows_other_libraries_its_entry_only(core):
    _, elf = core
    shown = {
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }
    assert {name for name in shown if not name.startswith("PyInit_")} == set()


def test_a_new_environment_uses_the_wheel(wheels, tmp_path):
    wheel = wheels.get(platform.machine()) or pytest.skip("needs x86_64 or aarch64")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "new"], check=True)
    python, kccl = tmp_path / "new/bin/python", tmp_path / "new/bin/kccl"
    pip = [python, "-m", "pip", "install", "--quiet", f"{wheel}[engine]"]
    installed = subprocess.run(pip, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def told(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    facts = json.loads(told(python, "-c", USE))
    assert facts["package"].startswith(f"{tmp_path / 'new'}/")
    assert facts["results"] == facts["simulated"] == [[3.0] * 5] * 2
    # Kernels for this CPU, as the checkout's core has them, though compiled for any.
    assert facts["instructions"] == ffi.string(lib.kccl_host_instruction_set()).decode()
    # Another compiler made the checkout's core.
    command = ("generate", "-n", "2", "--prompt", "class Stack:", "--max-tokens", "5", "--quiet")
    text = told(kccl, *command)
    assert text.strip() and text == told(sys.executable, "-m", "kccl", *command)
