"""The hints to install: commands that work today, of requirements that pyproject.toml has."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from source_tree import ROOT, python_files

import kccl
from kccl.base import extras
from kccl.bench.harness import outputs
from kccl.bench.peers import baselines
from kccl.engine.base import extras as of_engine
from kccl.gpu.cuda import CUDA
from kccl.gpu.hip import HIP
from kccl.jit import cache
from kccl.tools.checks import optional

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PIP = [sys.executable, "-m", "pip", "install"]


def installed_by(text):
    """The requirements of the command that a text has: those of its words that are requirements."""
    command = text[text.index(shlex.join(PIP)) :]
    words = shlex.split(command.split("; or ")[0].replace("'s driver", " driver"))
    assert words[:4] == PIP
    return [word.rstrip(",") for word in words[4:] if re.search("[<>=]=", word)]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_command_has_the_requirements_of_pyproject(extra):
    words = shlex.split(kccl.install_command(extra))
    assert words == [*PIP, *EXTRAS[extra]]
    for requirement in words[4:]:
        assert Requirement(requirement).name


def test_after_a_hint_setuptools_can_be_imported():
    """PyTorch's inductor imports it."""
    pytest.importorskip("setuptools")
    program = "from kccl.base import extras; print(extras.pip_install()); import setuptools"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, shlex.join(PIP) + "\n"), done.stderr


METADATA = """Metadata-Version: 2.4
Name: kccl
Version: 1
Requires-Dist: numpy>=1.26
Provides-Extra: bench
Requires-Dist: matplotlib>=3.8; extra == "bench"
Requires-Dist: pandas<4,>=2.1; extra == 'bench'
Provides-Extra: none
"""


def test_without_a_checkout_what_is_installed_says_it(monkeypatch, tmp_path):
    (tmp_path / "METADATA").write_text(METADATA)
    (tmp_path / "direct_url.json").write_text('{"url": "file:///src/kccl"}')
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(tmp_path))
    assert extras.requirements() == ["numpy>=1.26"]
    assert shlex.split(extras.install("bench")) == [*PIP, "matplotlib>=3.8", "pandas<4,>=2.1"]
    assert extras.reinstall().endswith("--force-reinstall --no-deps file:///src/kccl")


def test_without_both_the_hint_still_names_the_extra(monkeypatch, tmp_path):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", missing)
    assert extras.install("bench") == "install what the extra bench of KCCL's pyproject.toml names"
    assert extras.reinstall().endswith("--no-deps .")


def test_where_there_is_no_pip_uv_installs(monkeypatch):
    monkeypatch.setattr(extras, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    words = shlex.split(kccl.install_command("amd"))
    assert words == ["uv", "pip", "install", "--python", sys.executable, *EXTRAS["amd"]]


def test_an_unknown_extra_is_refused():
    with pytest.raises(ValueError, match="extra is 'engines', must be one of mpi, cuda, "):
        kccl.install_command("engines")


def test_each_hint_installs_what_is_missing(monkeypatch):
    assert installed_by(CUDA.cure) == installed_by(CUDA.compiler.cure) == EXTRAS["cuda"]
    assert installed_by(HIP.cure) == installed_by(HIP.compiler.cure) == EXTRAS["amd"]
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(kccl.Error) as told:
        of_engine.library("safetensors")
    assert installed_by(str(told.value)) == EXTRAS["engine"]
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    assert installed_by(optional.packages().cure) == EXTRAS["bench"]
    assert installed_by(optional.mpi().cure) == EXTRAS["mpi"]
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot needs matplotlib: ") as refused:
        outputs.try_picture("--plot", Path("x.png"))
    assert installed_by(str(refused.value)) == EXTRAS["bench"]
    assert installed_by(cache.compiler_cure()) == ["ziglang==0.17.0"]


@pytest.mark.parametrize("launcher", ["kccl run", "mpi"])
def test_the_hint_about_mpis_rows_installs_mpi(launcher, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    missing = baselines.InJob(SimpleNamespace(launcher=launcher)).missing
    assert installed_by(missing.replace(" brings both)", "")) == EXTRAS["mpi"]


def test_the_library_that_cannot_be_imported_is_named():
    for module, extra in (("mpi4py.MPI", "mpi"), ("cuda.bindings", "cuda"), ("jinja2", "engine")):
        told = extras.missing(ImportError("gone", name=module))
        assert installed_by(told) == EXTRAS[extra] and told.startswith("kccl needs ")
    told = extras.missing(ImportError("no\nrich", name="rich"))
    assert told.startswith("kccl needs rich, which cannot be imported (no rich): ")
    assert extras.missing(ImportError("libc.so", name="os")) == "os: libc.so"


def test_the_core_is_built_again_from_its_checkout():
    program = "import sys; sys.modules['kccl._core'] = None; import kccl.base.abi"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"Build it with: {shlex.join([*PIP, '-e', str(ROOT)])}")


@pytest.mark.parametrize("folder", ["kccl", "engine", "bench"])
def test_no_hint_asks_an_index_for_kccl(folder):
    for path in python_files(folder):
        if path.name == "extras.py":
            continue
        found = re.findall(r"pip install [^\"]*kccl\S*", path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found}"
