"""Limits how deep JSON may nest: code that reads and writes JSON is recursive, and would fail."""

from typing import Any

MOST_LEVELS = 200


def nests_too_deeply(value: Any) -> bool:
    """Tells whether a value has more than MOST_LEVELS levels of lists and objects."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in inner for each in some if isinstance(each, dict | list)]
        if not level:
            return False
    return True
