"""`kccl doctor`: shows what runs on this machine, what does not, why, and the cure.

The checks are in checks/. A check that raises gives the finding "no", with the exception's text.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TextIO

from ..base.env import Env
from ..base.errors import BackendError
from .checks import CHECKS
from .checks.finding import Finding
from .screen import NARROW, console, draws

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "warn": "yellow", "no": "red"}


def main(*, as_json: bool) -> int:
    """Runs all checks and prints them.

    Args:
        as_json: Print one JSON document on stdout, and the tables on stderr.

    Returns:
        0, or 1 when something that the host backend needs is missing.
    """
    rows = list(_run_all())
    is_well = all(found.status != "no" for _, is_needed, found in rows if is_needed)
    _print_table(rows, sys.stderr if as_json else sys.stdout)
    if as_json:
        checks = [
            {"name": name, "is_needed": is_needed, **asdict(found)}
            for name, is_needed, found in rows
        ]
        document = {"is_well": is_well, "checks": checks, "variables": _variables()}
        sys.stdout.write(json.dumps(document) + "\n")
    return 0 if is_well else 1


def _run_all() -> Iterator[tuple[str, bool, Finding]]:
    """Runs the checks. Shows on a terminal which one runs, because some take seconds."""
    screen = console(sys.stderr)
    if not draws(screen):
        for name, is_needed, check in CHECKS:
            yield name, is_needed, _run(check)
        return
    with screen.status("") as status:
        for name, is_needed, check in CHECKS:
            status.update(f"checking: {name}")
            yield name, is_needed, _run(check)


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except BackendError as error:
        return Finding("no", str(error), "Ranks cannot start without it.", "Allow what is refused.")
    except Exception as error:
        return Finding(
            "no",
            f"{type(error).__name__}: {error}",
            "The check itself failed.",
            "Look up the exception, and report it.",
        )


def _print_table(rows: list[tuple[str, bool, Finding]], file: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    screen = console(file)
    if screen.width < NARROW:
        _print_list(rows, screen)
    else:
        table = Table(box=SIMPLE_HEAD, show_edge=False)
        for heading in ("check", "", "found"):
            table.add_column(heading, overflow="fold")
        for name, is_needed, found in rows:
            title = Text(name, "bold" if is_needed else "")
            table.add_row(title, Text(found.status, _STYLES[found.status]), Text(_what(found)))
        screen.print(table)
    variables = Table(box=SIMPLE_HEAD, show_edge=False)
    for heading in ("variable", "value", ""):
        variables.add_column(heading, overflow="fold")
    for name, value in _variables().items():
        variables.add_row(name, Text(value["value"]), "set" if value["is_set"] else "default")
    screen.print()
    screen.print(variables)
    screen.print("bold: the host backend needs it")


def _print_list(rows: list[tuple[str, bool, Finding]], screen: "Console") -> None:
    from rich.padding import Padding
    from rich.text import Text

    for name, is_needed, found in rows:
        status = Text(f"{found.status:<5}", _STYLES[found.status])
        screen.print(status + Text(name, "bold" if is_needed else ""))
        screen.print(Padding(Text(_what(found), overflow="fold"), (0, 0, 0, 5)))


def _what(found: Finding) -> str:
    return "\n".join(part for part in (found.found, found.reason, found.cure) if part)


def _variables() -> dict[str, dict[str, Any]]:
    """Returns all variables that KCCL reads, and other variables that are set and start with
    KCCL_.
    """
    defaults = {f"KCCL_{field.name.upper()}": str(field.default) for field in fields(Env)}
    given = {name: text for name, text in os.environ.items() if name.startswith("KCCL_")}
    return {
        name: {"value": text, "is_set": name in given} for name, text in (defaults | given).items()
    }
