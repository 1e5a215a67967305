"""Tries a run's files and stdout before anything is measured, and writes them at its end."""

from __future__ import annotations

import csv
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import kccl

from .measure import Row

_TRIAL = b"\0" * (64 << 10)


def try_file(option: str, path: Path) -> None:
    """Raises ValueError if a file cannot be written. Does not change it, nor leave a new file."""
    what = f"{option} {path}"
    _refuse_dash(option, path)
    if path.is_dir():
        raise ValueError(f"{what} is a folder: name a file")
    try:
        if path.exists() and not path.is_file():
            _try_device(path)
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{what} is not writable")
        with tempfile.TemporaryFile(dir=path.resolve().parent) as trial:
            trial.write(_TRIAL)
            trial.flush()
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {error.strerror}") from error


def try_picture(option: str, path: Path) -> None:
    """Checks a picture's file as try_file() does, and that its suffix is a known format."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: {kccl.install_command('bench')}")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file, as in {path / 'latency.png'}")
    _refuse_dash(option, path)
    if path.suffix.lower() not in _suffixes():
        kind = f"has the suffix {path.suffix}" if path.suffix else "has no suffix"
        raise ValueError(
            f"{option} {path} {kind}: pictures are {', '.join(_suffixes())}, as in "
            f"{path.with_suffix('.png')}"
        )
    try_file(option, path)


def _suffixes() -> list[str]:
    """Returns the suffixes of known picture formats, as ".png"."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return sorted(f".{kind}" for kind in FigureCanvasAgg.get_supported_filetypes())


def _refuse_dash(option: str, path: Path) -> None:
    if str(path) == "-":
        raise ValueError(
            f"{option} takes a file's name, and - is not for stdout here: name a file; --json "
            "prints to stdout"
        )


def try_stdout() -> None:
    """Raises OSError if nothing can be written to stdout."""
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except OSError:  # stdout has no file descriptor, as in some tests and in notebooks
        return
    kind = os.fstat(number).st_mode
    if stat.S_ISCHR(kind) and not os.isatty(number):
        # Only a write tells whether a device such as /dev/null or /dev/full takes data.
        os.write(number, b"\n")
    elif stat.S_ISREG(kind) and os.fstatvfs(number).f_bavail == 0:
        raise OSError("there is no space left for stdout")


def write(path: Path, act: Callable[[Path], None], failures: list[str]) -> None:
    """Calls `act` to write a file. Turns an OSError into a sentence in `failures`."""
    try:
        act(path)
    except OSError as error:
        failures.append(f"{path} could not be written: {error.strerror or error}")


def write_csv(rows: Sequence[Row], columns: Sequence[str], path: Path) -> None:
    """Writes all fields of all rows as CSV. The items of a list are separated by spaces."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    name: " ".join(value) if isinstance(value, list) else value
                    for name, value in row.items()
                }
            )


def silence(file: IO[str]) -> None:
    """Redirects a file that cannot be written to /dev/null, so that Python's exit does not fail."""
    try:
        number = file.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _try_device(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(13, "permission denied")
    # Does not try a pipe or a terminal, because its reader would see the trial.
    if stat.S_ISCHR(path.stat().st_mode):
        number = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        try:
            if not os.isatty(number):
                os.write(number, b"\n")
        finally:
            os.close(number)
