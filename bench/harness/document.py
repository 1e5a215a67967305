"""Makes the JSON document of a run: its machine, commit, command and rows."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from .measure import Row

Document = dict[str, Any]

_ARCHIVAL = Path(__file__).resolve().parents[2] / ".git_archival.txt"


def document(
    rows: Sequence[Row],
    machine: Mapping[str, Any],
    command: Sequence[str] | None = None,
    program: Sequence[str] = ("kccl",),
) -> Document:
    """Returns the document of these rows, made on this machine by this process.

    Args:
        rows: The rows of the run.
        machine: What machine() returned before the ranks were pinned, and further facts, such as
            the GPUs.
        command: Arguments that repeat the run; None for those of this process.
        program: What takes the arguments.
    """
    return {
        "machine": dict(machine),
        "commit": commit(),
        "command": shlex.join(
            [*program, *map(_shared, sys.argv[1:] if command is None else command)]
        ),
        "rows": list(rows),
    }


def tell(found: Document, print_table: Callable[[Sequence[Row]], None], *, as_json: bool) -> int:
    """Prints the table of a document's rows. Returns the exit code: 1 if an element was wrong.

    Args:
        found: The document.
        print_table: Prints the rows.
        as_json: Prints the document, too, and the table on stderr.
    """
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        print_table(found["rows"])
    if as_json:
        print(json.dumps(found))
    return int(any(row["wrong"] for row in found["rows"]))


def _shared(argument: str) -> str:
    """Returns an argument without folders of this machine, because records are published."""
    option, equals, path = argument.rpartition("=")
    is_path = path.startswith(("/", "./", "../", "~/"))
    return option + equals + (Path(path).name if is_path else path)


def machine(ranks: int) -> dict[str, Any]:
    """Returns facts about the machine on which figures depend. There is no host name, because
    records are published.

    Must be called before ranks are pinned: `allowed_cpus` counts the CPUs that this thread may use.
    """
    from kccl import topology

    found = topology.discover()
    allowed = found.allowed_cpus
    return {
        "cpu_model": found.cpu_model,
        "architecture": found.architecture,
        "cpus": len(found.cpus),
        "allowed_cpus": None if allowed is None else len(allowed),
        "kernel": found.kernel,
        "ranks": ranks,
    }


def subtitle(document: Document) -> str:
    """Returns the machine and the commit of a document, in one line for pictures."""
    facts = document["machine"]
    gpus = facts.get("gpus")
    machine = f"{facts['cpu_model']}, {facts['cpus']} CPUs"
    if gpus:
        machine = f"{len(gpus)} x {gpus[0]}, no multicast"
    return f"{machine}, commit {document['commit']}"


def commit() -> str:
    """Returns the commit of the running code, with "-dirty" if its tree has changes; or the version
    if there is no commit.

    Code that was installed from a checkout is "<version> installed from <commit>", because the
    checkout may have changed since. A tree made by `git archive` has its commit in
    .git_archival.txt.
    """
    here = Path(__file__).resolve().parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is not None:
        return _head(here) or "unknown"
    archived = _archived(_ARCHIVAL)
    if archived is not None:
        return archived
    try:
        distribution = importlib.metadata.distribution("kccl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
    folder = Path(unquote(urlparse(origin).path))
    head = _head(folder) if origin.startswith("file://") else None
    return f"{distribution.version} installed from {head}" if head else distribution.version


def _archived(path: Path) -> str | None:
    """Returns the commit that `git archive` has written to this file, None if there is none."""
    match = re.match(r"node: ([0-9a-f]{12})", path.read_text("utf-8") if path.exists() else "")
    return match and match[1]


def _head(folder: Path) -> str | None:
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    return head and head + ("-dirty" if _git(folder, "status", "--porcelain") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command; None if it fails, or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def load(path: Path) -> list[Document]:
    """Returns the documents of a file, one a line. Skips other lines, such as a printed table."""
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
