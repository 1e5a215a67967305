"""The libraries that KCCL needs, by extra, and the commands that install them.

KCCL is in no package index, so `pip install 'kccl[bench]'` finds nothing: the commands name the
libraries themselves.
"""

import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# A module -> the project that contains it, if their names differ.
_PROJECTS = {"cuda": "cuda-bindings", "hip": "hip-python", "rocm": "hip-python"}


def requirements(extra: str = "") -> list[str]:
    """Returns what pip must install for an extra, as in ["matplotlib>=3.8"]; without one, for KCCL
    itself.

    Reads pyproject.toml in a checkout, elsewhere the installed package's metadata. Returns [] if
    there is neither.

    Raises:
        ValueError: There is no such extra.
    """
    found = _by_extra()
    if found and extra not in found:
        raise ValueError(f"extra is {extra!r}, must be one of {', '.join(filter(None, found))}")
    return found.get(extra, [])


def install(extra: str) -> str:
    """Returns the command that installs for this interpreter what an extra needs.

    Raises:
        ValueError: There is no such extra.
    """
    wanted = requirements(extra)
    if not wanted:
        # KCCL runs from a copy of its sources without pyproject.toml, and is not installed, so the
        # list is not known.
        return f"install what the extra {extra} of KCCL's pyproject.toml names"
    return f"{pip_install()} {shlex.join(wanted)}"


def reinstall() -> str:
    """Returns the command that installs KCCL again from where it came."""
    if (_ROOT / "pyproject.toml").exists():
        return f"{pip_install()} -e {shlex.quote(str(_ROOT))}"
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution("kccl").read_text("direct_url.json") or "{}"
    except PackageNotFoundError:
        text = "{}"
    # Without a recorded address, the command installs from the current folder, the checkout.
    source = json.loads(text).get("url", ".")
    return f"{pip_install()} --force-reinstall --no-deps {shlex.quote(source)}"


def pip_install() -> str:
    """Returns how a command begins that installs for this interpreter: with pip, or with uv if it
    has no pip.
    """
    python = shlex.quote(sys.executable)
    # Why not importlib.util.find_spec(): setuptools has a finder that takes a search for pip for
    # pip's start. From then on, before Python 3.12, `import setuptools` fails in this process.
    has_pip = PathFinder.find_spec("pip") is not None
    return f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"


def missing(error: ImportError) -> str:
    """Returns the error of an import in words: what cannot be imported, and what installs it."""
    # Finds the first failed import, because libraries wrap it into advice of many lines.
    first: BaseException = error
    while isinstance(first.__cause__ or first.__context__, ImportError):
        first = first.__cause__ or first.__context__ or first
    told = " ".join(str(first).split())
    module = (error.name or "").partition(".")[0]
    project = _PROJECTS.get(module, module)
    for extra, wanted in _by_extra().items():
        names = [_name(requirement) for requirement in wanted]
        if project and _normal(project) in names:
            cure = install(extra)
            return f"kccl needs {project}, which cannot be imported ({told}): {cure}"
    # A module that no extra names is the compiled core, whose error says what to do, or a library
    # that another library needs.
    return " ".join(str(error).split()) if module in ("", "kccl") else f"{module}: {told}"


def _by_extra() -> dict[str, list[str]]:
    pyproject = _ROOT / "pyproject.toml"
    if pyproject.exists():
        import tomllib

        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        extras: dict[str, list[str]] = project["optional-dependencies"]
        return {"": project["dependencies"]} | extras
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution("kccl")
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {"": []}
    for extra in installed.metadata.get_all("Provides-Extra") or ():
        found[extra] = []
    for line in installed.requires or ():
        requirement, _, marker = line.partition(";")
        named = re.search(r"extra == [\"']([\w-]+)[\"']", marker)
        found.setdefault(named[1] if named else "", []).append(requirement.strip())
    return found


def _name(requirement: str) -> str:
    parts = re.match(r"[\w.-]+", requirement)
    return _normal(parts[0]) if parts else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
