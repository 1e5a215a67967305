"""Searches of the Spin models in csrc/models, and what their comments quote.

A comment "file function(): code" of a model quotes code that stands in that function.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from source_tree import ROOT

MODELS = ROOT / "csrc/models"
# States on the longest path. The searches need half of it.
_MAX_DEPTH = 1_000_000
_MAX_MEGABYTES = 1500

# The file that has the processes, and definitions.
Run = tuple[str, str]
# search(*run): what pan said.
Search = Callable[[str, str], str]


def _find_spin() -> str:
    """Spin the model checker; a Python package has a command of that name too."""
    for folder in os.environ["PATH"].split(os.pathsep):
        path = shutil.which("spin", path=folder)
        if path is None:
            continue
        version = subprocess.run([path, "-V"], capture_output=True, text=True).stdout
        if version.startswith("Spin Version 6"):
            return path
    pytest.skip("no Spin 6: apt-get install spin")


def _find_compiler() -> str:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return found or pytest.skip("no C compiler, which Spin needs: cc, gcc, clang")


def searches(
    complete: Iterable[Run], bugs: Iterable[Run], new_folder: Callable[[], Path]
) -> Iterator[Search]:
    """Yields a Search, for a fixture. All searches start at once, two at a time.

    Args:
        complete: The runs that are searched completely.
        bugs: The runs that end at the first error.
        new_folder: Makes a folder for one search.
    """
    spin, compiler = _find_spin(), _find_compiler()
    complete = list(complete)
    # Made here: pytest makes its first folder anew when asked for one, which no two threads may do.
    folders = {one: new_folder() for one in [*complete, *bugs]}

    def run(one: Run) -> str:
        folder, (model, definitions) = folders[one], one
        for path in MODELS.glob("*.pml"):
            shutil.copy(path, folder)
        defined = [f"-D{definition}" for definition in definitions.split()]
        # Why so little optimisation: compiling takes longer than most of the searches.
        level = "-O1" if one in complete else "-O0"
        limits = ["-DSAFETY", f"-DMEMLIM={_MAX_MEGABYTES}"]
        for command in (
            [spin, f"-P{compiler} -E -x c", "-a", *defined, model],
            [compiler, "-w", level, *limits, "pan.c", "-o", "pan"],
        ):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        pan = [folder / "pan", f"-m{_MAX_DEPTH}"]
        return subprocess.run(pan, cwd=folder, capture_output=True, text=True).stdout

    # With vfork, which Python prefers, one of two threads that start programs at once has failed
    # with EFAULT on a sandboxed kernel.
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(subprocess, "_USE_VFORK", False)
        said: dict[Run, Future[str]] = {one: pool.submit(run, one) for one in folders}
        yield lambda *one: said[one].result()
        pool.shutdown(cancel_futures=True)


def check_complete(said: str) -> None:
    """Asserts that a search has tried all runs, and that none goes wrong."""
    assert "errors: 0" in said, said
    # pan says so when it left states out.
    for excuse in ("Search not completed", "max search depth too small", "bit statespace"):
        assert excuse not in said, said
    for checked in ("assertion violations", "invalid end states"):
        assert re.search(rf"{checked}\s+\+", said), said
    depth, states = (
        int(re.search(pattern, said)[1])
        for pattern in (r"depth reached (\d+)", r"(\d+) states, stored")
    )
    assert depth < _MAX_DEPTH - 1
    assert states > 1000


def check_found(said: str, error: str) -> None:
    """Asserts that a search has found an error that matches."""
    assert "errors: 1" in said, said
    assert re.search(error, said), said


def never_reached(said: Iterable[str]) -> list[str]:
    """The statements that none of these searches has reached."""
    never, count = Counter[str](), 0
    for each in said:
        listed = re.findall(r'(\w+\.pml:\d+), state \d+, "(.*)"', each)
        never.update({place for place, statement in listed if statement != "-end-"})
        count += 1
    return [place for place, times in never.items() if times == count]


def plantable(model: str) -> set[str]:
    """The names of the bugs that can be planted, with NOTHING."""
    text = (MODELS / model).read_text()
    listed = text[text.index("#define NOTHING") : text.index("#ifndef PLANTED")]
    return set(re.findall(r"^#define (\w+) \d+", listed, re.MULTILINE))


def planted(definitions: Iterable[str]) -> set[str]:
    """The names of the bugs that these definitions plant."""
    return set(re.findall(r"PLANTED=(\w+)", " ".join(definitions)))


# ---- Quotes ------------------------------------------------------------------------------------


def squeezed(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())


def quotes(suffixes: str) -> list[tuple[str, str, str]]:
    """(file, function or nothing, squeezed code) of each comment that quotes such a file.

    `suffixes` is a regular expression.
    """
    found = []
    for path in sorted(MODELS.glob("*.pml")):
        for comment in re.findall(r"/\*(.*?)\*/", path.read_text(), re.DOTALL):
            text = re.sub(r"\n\s*\*", " ", comment)
            quote = re.fullmatch(rf"\s*(\w+\.(?:{suffixes}))(?: (\w+)\(\))?:(.*)", text, re.DOTALL)
            if quote:
                found.append((quote[1], quote[2] or "", squeezed(quote[3])))
    return found


def check_quotes(
    suffixes: str,
    code: Callable[[str, str], str],
    modelled: dict[str, tuple[str, ...]],
    steps: str,
) -> None:
    """Asserts that what is quoted is there, and that each step of what is modelled is quoted.

    Args:
        suffixes: As quotes() takes it.
        code: (file, function or nothing) -> the squeezed code.
        modelled: File -> its functions that are modelled.
        steps: What must be quoted there, as a regular expression on squeezed code.
    """
    left = {(name, each): code(name, each) for name, every in modelled.items() for each in every}
    gone = []
    for name, function, quoted in quotes(suffixes):
        text = left.get((name, function)) or code(name, function)
        if quoted not in text:
            gone.append((name, function, quoted))
        # What is quoted twice must be there twice.
        left[name, function] = text.replace(quoted, "", 1)
    assert not gone, f"quoted, and not there: {gone}"
    missing = [
        (name, function, step)
        for name, functions in modelled.items()
        for function in functions
        for step in re.findall(steps, left[name, function])
    ]
    assert not missing, f"there, and not quoted: {missing}"
