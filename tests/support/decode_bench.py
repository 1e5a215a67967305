"""`kccl bench decode` in this process, for tests."""

from __future__ import annotations

import json
from typing import Any

from kccl.tools import cli as command

FAST = ("--new-tokens", "5", "--repeats", "3")


def bench(*arguments: str) -> int:
    return command.main(["bench", "decode", *FAST, *arguments])


def document_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found
