"""Decides which of a checkpoint's matrices stay in their stored format, and which are converted."""

from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise

from ..base.core import lib
from ..formats.base import Format
from ..formats.table import forms_of
from ..model.ops import KINDS, Rows

_PANEL_ROWS: int = lib.kKcclEnginePanelRows
# (whether the matrix is an expert's, name of the matrix or table) -> the kind of op that uses it.
_KIND_OF = {
    (kind.has_experts, name): kind.name
    for kind in KINDS.values()
    for name in (*kind.matrices, kind.table)
    if name
}


def op_of(name: str) -> tuple[str, str]:
    """Returns the op that uses a matrix or table, in two parts: its layer, as in "layers.3." or "",
    and its kind.
    """
    *layer, part = name.split(".")
    is_expert = "experts" in layer
    # Only the first two words of "layers.3.experts.5" name the layer.
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
        stored: Matrix or table -> its format in the file.
        shapes: Their shapes. Those of matrices that are divided among lanes are [lanes, rows,
            columns].
        usual: The format to which the other matrices are converted.
        keeps: The names of the formats that are kept.
        is_alike: Whether a kind of op must have one format for all its matrices in all layers.
    """
    if is_alike:
        return _formats_alike(stored, shapes, usual, keeps)
    # (layer, kind) of an op, as op_of() has them -> matrix -> format.
    given: dict[tuple[str, str], dict[str, Format]] = {}
    for name, in_file in stored.items():
        whole = _whole(in_file, shapes[name][-1], keeps)
        given.setdefault(op_of(name), {})[name] = whole[0] if whole else usual
    for (layer, kind), formats in given.items():
        has_several = len(set(formats.values())) > 1
        if has_several and not _may_differ(kind, formats, shapes, usual):
            given[layer, kind] = dict.fromkeys(formats, usual)
    # Kind of op -> the formats of its ops' first matrices.
    of_kinds: dict[str, set[Format]] = {}
    for (_, kind), formats in given.items():
        of_kinds.setdefault(kind, set()).add(next(iter(formats.values())))
    found: dict[str, Format] = {}
    for (layer, kind), formats in given.items():
        first, *_ = formats.values()
        has_one = len(of_kinds[kind]) == 1
        found[kind] = first if has_one else usual
        if not has_one and first.is_on_host:
            found[layer + kind] = first
        found |= {name: each for name, each in formats.items() if each is not first}
    return found


def _whole(in_file: Format, columns: int, keeps: Collection[str]) -> list[Format]:
    """Returns the formats that the host keeps of a file's format, or to which it expands that, if
    lanes have whole blocks.
    """
    kept = [each for each in (in_file, *in_file.forms) if each.name in keeps]
    forms = [form for each in kept for form in (each, each.cut)]
    return [each for each in forms if each and columns % each.block == 0]


def _kept_forms(in_file: Format, keeps: Collection[str], kind: str) -> list[Format]:
    """Returns the formats in which the monokernel's ops of a kind, or the host's, keep a format of
    a file, or to which they expand it. Those of formats/nested.py are not tested with experts,
    which get none of them. They are slower than others, and so come last, but before any that
    rounds.
    """
    forms: list[Format | None] = []
    for form in (in_file, *in_file.forms):
        forms += [form, form.cut] if form.name in keeps else []
        if not KINDS[kind].has_experts:
            forms += [each for each in forms_of(form) if each.name in keeps]
    found = [each for each in forms if each]
    return sorted(found, key=lambda each: each.has_minimums or bool(in_file.rounding(each)))


def _formats_alike(
    stored: Mapping[str, Format],
    shapes: Mapping[str, tuple[int, ...]],
    usual: Format,
    keeps: Collection[str],
) -> dict[str, Format]:
    """Returns kept_formats() where a kind of op has one format. If its matrices have several, that
    is the smallest one that holds the numbers of all.
    """
    # Kind of op -> the formats that hold the numbers of all matrices so far.
    found: dict[str, list[Format]] = {}
    for name, in_file in stored.items():
        columns, (_, kind) = shapes[name][-1], op_of(name)
        forms = [each for each in _kept_forms(in_file, keeps, kind) if columns % each.block == 0]
        found[kind] = [each for each in found.get(kind, forms) if each in forms]
    return {kind: forms[0] if forms else usual for kind, forms in found.items()}


def shown_format(stored: Format) -> str:
    """Returns the name of a stored format for messages: Format.in_files up to "/". What follows,
    the number of columns that share a scale, is the engine's own addition.
    """
    return stored.in_files.partition("/")[0]


def holds(given: Format, stored: Format) -> bool:
    """Tells whether a format holds the numbers of a stored one: it is that format, or its quarters,
    or one to which the monokernel's blocks are converted, or one to which the format is expanded.
    """
    if given.in_files == stored.in_files or given in forms_of(stored):
        return True
    return stored.form_of(given) is not None


def _may_differ(
    kind: str, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]], usual: Format
) -> bool:
    """Tells whether an op can multiply matrices of several formats. Only qkv on the host can."""
    of_host = [each.is_on_host or each is usual for each in formats.values()]
    if KINDS[kind].rows is not Rows.HEADS or not all(of_host):
        return False
    # A panel must have one format. So a matrix must end at a panel's end if the next matrix has
    # another format.
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
    """Returns sentences that say which formats of blocks are expanded to others, and what that
    rounds, and which are converted to 16 bits, and why. Returns none if `keeps` is empty.

    Args:
        stored, shapes, keeps: As in kept_formats().
        given: Matrix -> the format in which it is given.
        in_file: Matrix -> its name for messages.
    """
    # (layer, kind) of an op, as op_of() has them -> the formats of its matrices in the file.
    of_ops: dict[tuple[str, str], set[Format]] = {}
    for name, each in stored.items():
        of_ops.setdefault(op_of(name), set()).add(each)
    named: dict[str, list[str]] = {}
    for name, each in stored.items() if keeps else ():
        if form := each.form_of(given[name]):
            rounding = each.rounding(form) or "without rounding"
            told = f"{shown_format(each)} is read as {shown_format(form)}, {rounding}"
            named.setdefault(told, []).append(in_file[name])
            continue
        if each.block == 1 or holds(given[name], each):
            continue
        forms = _kept_forms(each, keeps, op_of(name)[1])
        # The host executor multiplies this format. That another executor always converts it is no
        # reason for a notice.
        if not forms and all(form.name not in keeps for form in forms_of(each)):
            continue
        columns = shapes[name][-1]
        if not forms:
            why = "on GPUs it is not multiplied in experts"
        elif columns % (block := min(form.block for form in forms)):
            why = f"a lane's {columns} columns are no whole blocks of {block}"
        elif len(of_ops[op_of(name)]) > 1:
            why = "a product has matrices of several formats"
        else:
            why = "layers have several formats"
        told = f"{shown_format(each)} takes 16 bits a weight: {why}"
        named.setdefault(told, []).append(in_file[name])
    return tuple(f"{told}, as in {first}" for told, (first, *_) in named.items())
