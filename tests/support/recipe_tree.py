"""A copy of the checkout in which a test follows a recipe."""

import os
import re
import subprocess
import sys

from source_copy import copy_objects, copy_source, do_not_optimise, keep_one_type
from source_tree import replace_once

ABI = "csrc/include/kccl/abi.inc"


class Tree:
    """A copy of the checkout, and which files each recipe has touched in it."""

    def __init__(self, folder):
        self.folder = folder
        copy_source(folder)
        self._before = self._texts()

    def text(self, file):
        return (self.folder / file).read_text()

    def change(self, file, *changes):
        """Replaces texts that each occur once."""
        text = self.text(file)
        for before, after in changes:
            text = replace_once(text, before, after, file)
        (self.folder / file).write_text(text)

    def repeat(self, file, pattern, old, new):
        """Puts a copy behind each text that matches, with other words."""
        text = self.text(file)
        assert re.search(pattern, text), f"{file} changed: {pattern} is not there"
        both = re.sub(pattern, lambda found: found[0] + renamed(found[0], old, new), text)
        (self.folder / file).write_text(both)

    def copy(self, file, old, new):
        """A new file like this one, with other words in its name and in its text."""
        (self.folder / file.replace(old, new)).write_text(renamed(self.text(file), old, new))

    def add_kernels(self, *names):
        """Members of KcclKernel."""
        count = int(re.search(r"kKcclNumKernels = (\d+)", self.text(ABI))[1])
        members = "".join(f"    {name} = {count + i},\n" for i, name in enumerate(names))
        end = "    kKcclNumKernels = "
        self.change(ABI, (f"{end}{count}", f"{members}{end}{count + len(names)}"))

    def touched(self):
        """The files that were changed and those that were added since the last call."""
        before, self._before = self._before, self._texts()
        edited = {file for file, text in before.items() if self._before[file] != text}
        return edited, set(self._before) - set(before)

    def _texts(self):
        # What Python compiles is no part of a recipe.
        every = (path for path in self.folder.rglob("*") if path.is_file())
        paths = [path for path in every if path.parent.name != "__pycache__"]
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}


def renamed(text, old, new):
    return text.replace(old, new).replace(old.title(), new.title())


def run(tree, *command, **variables):
    done = subprocess.run(
        command,
        cwd=tree.folder,
        env=os.environ | {"PYTHONPATH": str(tree.folder)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def rebuild(tree):
    """Builds what has changed of a tree's extension, without optimisation."""
    copy_objects(tree.folder)
    do_not_optimise(tree.folder)
    run(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace")


def _keep_objects(folder):
    """Lets the checkout's objects serve for files that include abi.inc but not for the number of
    kernels: the engine's, and the simulator's but for one. They are two thirds of the build.
    """
    for place in ("csrc/sim", "engine/host"):
        for source in (folder / "kccl" / place).glob("*.cpp"):
            built = folder / "build/objects/kccl" / place / f"{source.stem}.o"
            if "kKcclNumKernels" not in source.read_text():
                os.utime(built)


def build(tree):
    """Builds the extension of a tree in a tenth of the time: for one element type, and without
    optimisation.
    """
    dtypes = tree.folder / "kccl/base/dtypes.py"
    text = dtypes.read_text()
    copy_objects(tree.folder)
    _keep_objects(tree.folder)
    keep_one_type(tree.folder)
    do_not_optimise(tree.folder)
    run(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    dtypes.write_text(text)


def python(tree, program):
    """What a program prints that may import the tests' modules."""
    folders = [tree.folder / "tests" / each for each in ("support", "sim", "hardware", "csrc")]
    # Behind the copy, what the tests themselves have: perhaps PyTorch.
    others = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join(map(str, (tree.folder, *folders, *others)))
    return run(tree, sys.executable, "-c", program, PYTHONPATH=path)
