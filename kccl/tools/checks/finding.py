"""The result of a check of `kccl doctor`, and how long a check may take."""

from dataclasses import dataclass

LIMIT_S = 30.0  # for a process that a check starts


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: "ok"; "warn": it works but costs time; "no": it does not work.
        found: What was found.
        reason, cure: One sentence each; "" for ok.
    """

    status: str
    found: str
    reason: str = ""
    cure: str = ""
