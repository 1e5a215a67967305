"""Spin, the model checker, for the models in csrc/models."""

import os
import shutil
import subprocess

import pytest
from source_tree import ROOT

MODELS = ROOT / "csrc/models"
# States on the longest path. The searches need half of it.
MAX_DEPTH = 1_000_000
MAX_MEGABYTES = 1500

# What can go wrong in any model, as pan says it.
WAITS_FOR_EVER = r"invalid end state"


def find_spin() -> str:
    """Spin the model checker; a Python package has a command of that name too."""
    for folder in os.environ["PATH"].split(os.pathsep):
        path = shutil.which("spin", path=folder)
        if path is None:
            continue
        version = subprocess.run([path, "-V"], capture_output=True, text=True).stdout
        if version.startswith("Spin Version 6"):
            return path
    pytest.skip("no Spin 6: apt-get install spin")


def find_compiler() -> str:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return found or pytest.skip("no C compiler, which Spin needs: cc, gcc, clang")


def search(model, definitions, folder, level="-O0"):
    """What pan says of all runs of a model.

    Args:
        model: Name of a file of csrc/models.
        definitions: Of the preprocessor, between spaces.
        folder: Empty.
        level: Of the compiler's optimisation.
    """
    spin, compiler = find_spin(), find_compiler()
    for path in MODELS.glob("*.pml"):
        shutil.copy(path, folder)
    defined = [f"-D{definition}" for definition in definitions.split()]
    limits = ["-DSAFETY", f"-DMEMLIM={MAX_MEGABYTES}"]
    for command in (
        [spin, f"-P{compiler} -E -x c", "-a", *defined, model],
        [compiler, "-w", level, *limits, "pan.c", "-o", "pan"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    pan = [folder / "pan", f"-m{MAX_DEPTH}"]
    return subprocess.run(pan, cwd=folder, capture_output=True, text=True).stdout
