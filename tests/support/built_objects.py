"""The objects that setup.py has compiled: a test that links them need not compile them again."""

from pathlib import Path

from source_tree import ROOT

_OBJECTS = ROOT / "build" / "objects" / "kccl"


def object_of(source: Path) -> Path | None:
    """The core's object for a C++ file of the checkout; None if none is up to date."""
    built = (_OBJECTS / source.relative_to(ROOT)).with_suffix(".o")
    rule = built.with_suffix(".d")
    if not (built.exists() and rule.exists()):
        return None
    files = [ROOT / name for name in rule.read_text().replace("\\\n", " ").split()[1:]]
    made = built.stat().st_mtime
    is_new = all(file.exists() and file.stat().st_mtime <= made for file in files)
    return built if is_new else None
