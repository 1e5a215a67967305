"""The wheel and the sdist: built as for a release, with the checkout's objects where the sdist has
the files that they were compiled from; installed, and used without the checkout.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from compilers import cxx
from source_copy import copy_objects, copy_source
from source_tree import ROOT

pytestmark = [pytest.mark.long, pytest.mark.takes(20)]

USE = """
import json
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np

import kccl
import kccl.bench.harness.collective
from kccl import topology
from kccl.plan.tuning import tuning_for


def main(comm):
    x = np.full(5, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    return x.tolist()


(command,) = entry_points(group="console_scripts", name="kccl")
print(json.dumps({
    "version": kccl.__version__,
    "results": kccl.run_threads(main, world_size=2),
    "simulated": kccl.run_threads(main, world_size=2, backend="sim"),
    "machines": sorted(topology.recorded()),
    "command": command.load().__module__,
    "files": {
        "package": kccl.__file__,
        "header": str(Path(kccl.include_dir()) / "kccl" / "kccl.cuh"),
        "tuning": tuning_for("host").source,
        "bench": kccl.bench.harness.collective.__file__,
        "topology": topology.__file__,
    },
}))
"""


def only_in_checkout() -> set[str]:
    """The files of the package that setup.py leaves out."""
    listed = re.search(
        r"^ONLY_IN_CHECKOUT = (\{.*?^\})", (ROOT / "setup.py").read_text(), re.M | re.S
    )
    return {
        f"{package.replace('.', '/')}/{module}.py"
        for package, module in ast.literal_eval(listed[1])
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that `build` makes from the unpacked sdist."""
    checkout = tmp_path_factory.mktemp("checkout") / "kccl"
    copy_source(checkout)
    dist, unpacked = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("unpacked")

    def build(what: str, source: Path) -> None:
        command = [sys.executable, "-m", "build", "--no-isolation", what, "--outdir", dist, source]
        built = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert built.returncode == 0, built.stdout[-4000:]

    build("--sdist", checkout)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    # An object is compiled anew if a file that it includes is newer or is not there.
    copy_objects(source)
    build("--wheel", source)
    return dist


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed into an empty folder."""
    site = tmp_path_factory.mktemp("site")
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    return site


def test_one_wheel_serves_all_python_versions(dist):
    (wheel,) = dist.glob("*.whl")
    assert re.fullmatch(r"kccl-[\d.]+-cp311-abi3-\w+\.whl", wheel.name)


def test_wheel_holds_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kccl"}
    assert [name for name in names if name.endswith(".so")] == ["kccl/_core.abi3.so"]
    sources = [
        *(ROOT / "kccl").rglob("*.py"),
        *(ROOT / "kccl" / "bench").rglob("*.py"),
        *(ROOT / "kccl" / "bench").rglob("*.cuh"),
        *(ROOT / "kccl" / "engine").rglob("*.py"),
        *(ROOT / "kccl" / "topology").rglob("*.py"),
    ]
    missing = {path.relative_to(ROOT).as_posix() for path in sources} - set(names)
    assert missing == only_in_checkout()
    # The kernels include it.
    assert "kccl/engine/abi.inc" in names
    # What csrc has that is read at run time. The core's own source is in the sdist.
    csrc = ROOT / "kccl" / "csrc"
    read = [*csrc.glob("cmake/*"), *csrc.glob("include/kccl/**/*.*"), *csrc.glob("sim/cuda/*")]
    # libkccl_nccl.so, which an installed copy can build.
    read += [*csrc.glob("nccl/*.*"), *csrc.glob("nccl/cuda/*")]
    read += [csrc / "host" / name for name in ("gpu.cpp", "cuda_driver.h")]
    # What a unit that is compiled at run time includes at its end.
    read += [csrc / "sim" / name for name in ("module.inc", "entries.inc", "exported.h")]
    for_host = ["module.inc", "idle.cpp", "mpi_progress.h", "host.h", "api.inc"]
    for_host += ["chain.h", "chain.inc", "nodes.h", "nodes.inc"]
    read += [csrc / "host" / name for name in for_host]
    wanted = {path.relative_to(ROOT).as_posix() for path in read}
    wanted.add("kccl/csrc/cmake/kcclVersion.cmake")
    assert {name for name in names if name.startswith("kccl/csrc/")} == wanted


def test_sdist_has_no_links_and_no_build_products(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if not (member.isfile() or member.isdir())] == []
    assert [member.name for member in members if member.name.endswith((".so", ".pyc"))] == []


def test_installed_copy_works_without_the_checkout(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    told = subprocess.check_output(
        [sys.executable, "-P", "-c", USE], cwd=tmp_path, env=environment, text=True
    )
    facts = json.loads(told)
    assert facts["results"] == facts["simulated"] == [[3.0] * 5] * 2
    assert facts["version"] == re.search(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    ).group(1)
    recorded = ROOT.glob("topology/machines/*.json")
    assert facts["machines"] == sorted(path.stem for path in recorded)
    assert facts["command"] == "kccl.tools.command"
    for what, path in facts["files"].items():
        assert Path(path).is_relative_to(installed), f"{what} comes from {path}"
        assert Path(path).is_file()


def test_installed_headers_are_all_a_program_needs(installed, tmp_path):
    compiler = cxx()
    program = tmp_path / "program.cpp"
    program.write_text("#include <kccl/kccl.cuh>\n")
    include = installed / "kccl" / "csrc" / "include"
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{include}", program], check=True)


def test_cmake_finds_the_installed_version_and_no_other(installed, tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    text = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', text, re.MULTILINE).group(1)
    series, _, patch = version.rpartition(".")
    major, _, minor = series.rpartition(".")
    suits = {f"{version} EXACT": True, series: True, f"{series}.{int(patch) + 1}": False}
    suits |= {f"{major}.{int(minor) + 1}": False, f"{int(major) + 1}": False, "0.0.1": False}
    for wanted, is_found in suits.items():
        folder = tmp_path / wanted.replace(" ", "-")
        folder.mkdir()
        (folder / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(consumer LANGUAGES NONE)\n"
            f"find_package(kccl {wanted} CONFIG REQUIRED)\n"
            'message(STATUS "found ${kccl_VERSION} in ${kccl_INCLUDE_DIR}")\n'
        )
        where = f"-Dkccl_DIR={installed / 'kccl' / 'csrc' / 'cmake'}"
        done = subprocess.run(
            [cmake, "-S", folder, "-B", folder / "out", where], capture_output=True, text=True
        )
        assert (done.returncode == 0) == is_found, wanted + done.stdout + done.stderr
        found = f"found {version} in {installed / 'kccl' / 'csrc' / 'include'}"
        assert (found in done.stdout) == is_found
        assert is_found or f"version: {version}" in done.stderr
