"""Implements `kccl plan decode`: projects the speed of decoding on recorded machines."""

import re
import sys
from functools import partial
from pathlib import Path

from .. import topology
from ..base.errors import InvalidArgument
from ..bench.names import did_you_mean
from ..topology.tables import Titled
from .machines import estimated, ranks_on, weakest
from .screen import NARROW, console, fitted
from .topo import draw, recorded


def show_decode(
    name: str | None,
    model: str | None,
    position: int,
    world_size: int | None,
    path: Path | None,
) -> int:
    """Prints the predicted time of a token, and what others published of the model.

    Args:
        name: The recorded machine's name. None: compares all recorded machines that have GPUs.
        model: The name of the recorded shape.
        position: The token's position.
        world_size: Number of ranks. None: all GPUs, but at most MOST_PREDICTED_RANKS.
        path: File to draw into; None to draw nothing.

    Raises:
        InvalidArgument: An argument is missing or wrong, or the model cannot predict it.
        BackendError: matplotlib is missing.
    """
    shapes = topology.models()
    if model is None or model not in shapes:
        given = "" if model is None else f", not {model!r}{did_you_mean(model, shapes)}"
        raise InvalidArgument(f"decode needs --model, one of {', '.join(shapes)}{given}")
    if position < 0:
        raise InvalidArgument(f"--position is {position}, must be 0 or more")
    shape = shapes[model]
    title = f"decode of {model} at position {position:,}"
    if name is None:
        found = _table(title, shape, position, world_size)
    else:
        found = {name: _one(title, name, shape, position, world_size)}
    lines = []
    for each in shape.published:
        lines.append(f"Published: {each}.")
        like = found.get(_machine(each))
        if (
            like is not None
            and not like.is_bound
            and not like.range_us[0] <= 1e6 / _speed(each) <= like.range_us[1]
        ):
            lines.append(f"That is outside of the range of {_machine(each)}; the code is another.")
    if lines:
        print(fitted("\n".join(lines), sys.stdout, hanging=4))
    if path is not None:
        published = [(_words(each), _speed(each)) for each in shape.published]
        draw(partial(topology.plot_decode, found, published, title), path)
    return 0


def _one(
    title: str, name: str, shape: topology.Shape, position: int, world_size: int | None
) -> topology.Projection:
    """Prints the projection on one machine, and returns it."""
    machine = recorded(name)
    ranks = ranks_on(name, machine, world_size)
    try:
        found = topology.predict_token(machine, shape, position, ranks)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from error
    gigabytes = shape.bytes_per_token(position) / 1e9
    low, high = found.range_us
    assumed = "" if found.is_compared else f"; {found.error:.0%} are assumed"
    speed = f"{1e6 / found.us:,.0f} tok/s"
    if found.is_bound:
        speed = f"at most {speed}"
    else:
        speed += f" ({1e6 / high:,.0f} to {1e6 / low:,.0f}{assumed})"
    lines = [
        f"{title} over {ranks} ranks on {name}: a prediction",
        f"  {speed}, {found.us:,.0f} us a token",
        f"  bound {1e6 / found.bound_us:,.0f} tok/s: {gigabytes:.2f} GB a token from memory",
        f"Shape: {shape.source}.",
        _TRUST,
        *estimated(machine, found.sources),
    ]
    print(fitted("\n".join(lines), sys.stdout, hanging=4))
    return found


_TRUST = (
    "The constants are fitted to models on 1 and 2 H200 GPUs. Where a record of H200 or H100 "
    "has the model, the error is at most "
    f"{topology.DECODE_ERROR:.0%}. No record has other GPUs, or more than 2, or a dense model "
    "whose ops wait for exchanges."
)


def _table(
    title: str, shape: topology.Shape, position: int, world_size: int | None
) -> dict[str, topology.Projection]:
    """Prints the projections on all recorded machines with GPUs, and returns those that fit."""
    found, rows = {}, []
    guesses: dict[str, None] = {}
    for name, machine in topology.recorded().items():
        if not topology.Graph(machine).gpus:
            continue
        try:
            each = topology.predict_token(machine, shape, position, world_size)
        except ValueError as error:
            rows.append((name, "", "", "", "", "", "", str(error)))
            continue
        found[name] = each
        low, high = (f"{1e6 / us:,.0f}" for us in reversed(each.range_us))
        if each.is_bound:
            low = high = ""
        if each.is_bound:
            basis = "a bound"
        elif each.is_compared:
            basis = f"{each.error:.0%}, as in records"
        else:
            basis = f"{each.error:.0%} are assumed"
        speeds = f"{1e6 / each.us:,.0f}", low, high, f"{1e6 / each.bound_us:,.0f}"
        rows.append((name, str(each.ranks), *speeds, weakest(machine, each.sources), basis))
        guesses |= {f"{name}. {text}": None for text in estimated(machine, each.sources)}
    columns = ("machine", "GPUs", "tok/s", "least", "most", "bound", "figures", "error")
    numbers = ("GPUs", "tok/s", "least", "most", "bound")
    tables = console(sys.stdout)
    tables.print(
        Titled(
            f"{title}: a prediction",
            columns,
            rows,
            right=numbers,
            only_wide=("bound", "figures", "error"),
            unbroken=("machine", "figures"),
        )
    )
    most = ""
    if any(each.is_bound for each in found.values()):
        most = " A mixture of experts that no record has is a bound: at most so many."
    # What the columns say that a narrow window has no room for.
    figures = ['The column "figures" says how the least certain figure of each machine is known.']
    missing = [f"{row[0]}: {row[-1]}." for row in rows if row[0] not in found]
    lines = [
        f"Shape: {shape.source}.",
        *(missing if tables.width < NARROW else figures),
        *guesses,
        f"{_TRUST}{most}",
    ]
    print(fitted("\n".join(lines), sys.stdout, hanging=4))
    return found


def _speed(published: str) -> float:
    return float(published.split(" ", 1)[0].replace(",", ""))


def _machine(published: str) -> str:
    """Returns the recorded machine's name: "h200-8" for "2,100 tok/s on 8 H200 (who)"."""
    match = re.match(r"\S+ tok/s on (\d+) (\w+)", published)
    return f"{match[2].lower()}-{match[1]}" if match else ""


def _words(published: str) -> str:
    """Returns where a published speed was reached: "8 H200" of "2,100 tok/s on 8 H200 (who)".
    A second speed, of another way, is left out.
    """
    return re.sub(r"^\S+ tok/s on |, \d,\d+ .*| \(.*", "", published)
