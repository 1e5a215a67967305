"""The result of a check of `kccl doctor`, and how long a check may take."""

from dataclasses import dataclass

LIMIT_S = 30.0  # the timeout of a process that a check starts


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: "ok"; "warn" if it works but costs time; "no" if it does not work.
        found: What was found, as a version or a path.
        reason, cure: Why the status is not "ok", and what to do. One sentence each; "" for "ok".
    """

    status: str
    found: str
    reason: str = ""
    cure: str = ""
