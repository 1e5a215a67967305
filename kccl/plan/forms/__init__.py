"""Makes collectives out of steps, for more ranks than a kernel can serve (csrc/host/chain.inc). A
form is one way to do that. Each collective has a file here, which is found by its name.

Each file has FORMS and fields(). The first form suits small messages, the last one large messages.
A form in which ranks post their parts (csrc/include/kccl/postings.cuh) comes first, and is used
wherever it can run.
"""

from importlib import import_module
from pathlib import Path

from ...base.errors import InvalidArgument
from ..steps import Fields, Form


def names() -> list[str]:
    """Returns the names of the forms of all collectives."""
    return [form.name for collective in _known() for form in of_collective(collective)[0]]


def of_collective(collective: str) -> tuple[tuple[Form, ...], Fields]:
    """Returns the forms of a collective, and its fields().

    Raises:
        InvalidArgument: The collective has no forms.
    """
    known = _known()
    if collective not in known:
        raise InvalidArgument(
            f"collective is {collective!r}, must be one of {', '.join(known)} where there are more "
            "ranks than in one group: comm.split() makes communicators of groups"
        )
    module = import_module(f"{__name__}.{collective}")
    forms: tuple[Form, ...] = module.FORMS
    fields: Fields = module.fields
    return forms, fields


def _known() -> list[str]:
    known = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")}
    return sorted(known - {"others", "parts", "sums"})
