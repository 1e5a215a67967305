"""Says in which formats a checkpoint's matrices are given, where some stay as they are stored."""

from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise

from ..base.core import lib
from ..formats.base import Format
from ..model.ops import KINDS, Rows

_PANEL_ROWS: int = lib.kKcclEnginePanelRows
# The kind of op that uses each matrix and table; of experts, and not.
_KIND_OF = {
    (kind.has_experts, name): kind.name
    for kind in KINDS.values()
    for name in (*kind.matrices, kind.table)
    if name
}


def op_of(name: str) -> tuple[str, str]:
    """Returns the name of the op that uses a matrix or table: "layers.3." or "", and its kind."""
    *layer, part = name.split(".")
    is_expert = "experts" in layer
    # A layer's name has two parts; the expert and its number are behind it.
    return "".join(f"{each}." for each in layer[:2]), _KIND_OF[is_expert, part]


def kept_formats(
    stored: Mapping[str, Format],
    shapes: Mapping[str, tuple[int, ...]],
    usual: Format,
    keeps: Collection[str],
    *,
    is_alike: bool = False,
) -> dict[str, Format]:
    """Returns the formats of matrices, as Checkpoint.formats has them.

    Args:
        stored: The format of each matrix and table in the file.
        shapes: Their shapes; those of matrices that are cut into lanes are [lanes, rows, columns].
        usual: The format of those that do not stay as they are stored.
        keeps: The names of the formats that stay.
        is_alike: Whether each kind of op has one format, in all layers and of all its matrices.
    """
    # By the op's name without its kind, and by its kind: the formats of its matrices.
    given: dict[tuple[str, str], dict[str, Format]] = {}
    for name, in_file in stored.items():
        forms = (in_file, in_file.cut) if in_file.name in keeps else ()
        whole = [each for each in forms if each and shapes[name][-1] % each.block == 0]
        given.setdefault(op_of(name), {})[name] = whole[0] if whole else usual
    for (layer, kind), formats in given.items():
        has_several = len(set(formats.values())) > 1
        if has_several and (is_alike or not _may_differ(kind, formats, shapes, usual)):
            given[layer, kind] = dict.fromkeys(formats, usual)
    # The formats of each kind's ops, by their first matrices.
    of_kinds: dict[str, set[Format]] = {}
    for (_, kind), formats in given.items():
        of_kinds.setdefault(kind, set()).add(next(iter(formats.values())))
    found: dict[str, Format] = {}
    for (layer, kind), formats in given.items():
        first, *_ = formats.values()
        has_one = len(of_kinds[kind]) == 1
        found[kind] = first if has_one else usual
        if not has_one and first.is_on_host and not is_alike:
            found[layer + kind] = first
        found |= {name: each for name, each in formats.items() if each is not first}
    return found


def shown_format(stored: Format) -> str:
    """Returns how a file stores a matrix, for messages: Format.in_files without the columns that
    share a scale here, which the file does not have.
    """
    return stored.in_files.partition("/")[0]


def _may_differ(
    kind: str, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]], usual: Format
) -> bool:
    """Tells whether an op can multiply its matrices in these formats, which are several."""
    of_host = [each.is_on_host or each is usual for each in formats.values()]
    if KINDS[kind].rows is not Rows.HEADS or not all(of_host):
        return False
    # A panel has one format, and the first rows of a matrix fill up the last panel of the one
    # before.
    ends = accumulate(shapes[name][-2] for name in formats)
    pairs = zip(pairwise(formats.values()), ends, strict=False)
    return all(one is other or end % _PANEL_ROWS == 0 for (one, other), end in pairs)


def expanded(
    stored: Mapping[str, Format],
    given: Mapping[str, Format],
    shapes: Mapping[str, tuple[int, ...]],
    in_file: Mapping[str, str],
    keeps: Collection[str],
) -> tuple[str, ...]:
    """Returns sentences that say which blocks become numbers of 16 bits, and why; none if no format
    of blocks stays as it is stored.

    Args:
        stored, shapes, keeps: As kept_formats() takes them.
        given: The format in which each of these matrices is given.
        in_file: The names by which messages call them.
    """
    named: dict[str, list[str]] = {}
    for name, each in stored.items() if keeps else ():
        if each.block == 1 or given[name].in_files == each.in_files:
            continue
        # The host multiplies it, and this backend does not.
        if each.is_on_host and each.name not in keeps:
            continue
        columns = shapes[name][-1]
        if each.name not in keeps:
            why = "the engine does not multiply it as it is stored"
        elif columns % (block := each.cut.block if each.cut else each.block):
            why = f"a lane's {columns} columns are no whole blocks of {block}"
        else:
            why = "a product has matrices of several formats"
        told = f"{shown_format(each)} takes 16 bits a weight: {why}"
        named.setdefault(told, []).append(in_file[name])
    return tuple(f"{told}, as in {first}" for told, (first, *_) in named.items())
