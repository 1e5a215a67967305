"""How the simulator makes the calls of each kernel: text for the tests' kernels, made of the
KernelSpecs and of the kernels' files.
"""

import re

from kccl.jit import cache, names
from kccl.plan.spec import PARTS, Counts, needs_attach
from kccl.plan.specs import KERNELS

_IN_KERNELS = cache.CSRC / "include" / "kccl" / "collectives"
# What a kernel that makes rounds passes as the most bytes of a round.
_MOST_BYTES = re.compile(r"\bin_rounds<[\w, ]+>\(channel, call, slice, ([^,]+),")

_MADE = """
template <>
struct Made<{constant}> : IsMade {{
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {{
        {body}
    }}
}};
"""
_MADE_BY_USERS = """
template <>
struct MadeByUsers<{constant}> : IsMade {{
    template <class T, class Op, class By>
    KCCL_DEVICE static Status make(By& by, const Call& call) {{
        return by([&](auto&&... of) {{ return {name}(of...{arguments}); }});
    }}
}};
"""


def makes():
    """What the kernels of the tests include before their own text."""
    specs = [spec for spec in KERNELS if spec.is_collective and needs_attach not in spec.needs]
    lines = [f"#include <kccl/kernels/{spec.name}.cuh>" for spec in specs]
    lines = ['#include "called.cuh"', *lines, '#include "made.cuh"', "namespace kccl {"]
    lines += [_made(spec) for spec in specs]
    lines += [_made_by_users(spec) for spec in specs if _is_called_by_users(spec)]
    return "\n".join((*lines, "}  // namespace kccl", ""))


def _types(spec):
    """The element type of a kernel's arrays, and its template arguments."""
    reduces = "class Op" in names.parameters(names.path_of(spec.name, cache.CSRC))
    return ("T", "<T, Op>") if reduces else ("uint8_t", "")


def _made(spec):
    element, types = _types(spec)
    function = f"{spec.name}{types}"
    has_chunks = spec.counts in (Counts.CHUNK_ELEMENTS, Counts.CHUNK_BYTES)
    rest = (", call.count" if has_chunks else "") + (", call.peer" if spec.takes else "")
    most = _MOST_BYTES.search(names.path_of(spec.name, cache.CSRC).read_text())
    if spec.name.endswith(PARTS):
        arrays = f"output_of<{element}>(call), input_of<{element}>(call)"
        body = f"return {function}(channel, {arrays}, call);"
    elif spec.counts is Counts.EVENTS:
        body = f"return {function}(channel);"
    elif most:
        # The tests' calls have no comm of their own.
        most_bytes = most[1].replace("call.comm", "channel.comm()")
        arrays = f"{element}* out, const {element}* in, uint32_t count"
        body = (
            f"const auto round = [&]({arrays}) {{\n"
            f"            return {function}(channel, out, in, count{rest});\n"
            "        };\n"
            f"        return make_in_rounds<{element}>(channel, call, round, {most_bytes});"
        )
    else:
        arrays = f"output_of<{element}>(call), input_of<{element}>(call)"
        body = f"return {function}(channel, {arrays}, call.count{rest});"
    return _MADE.format(constant=spec.constant, body=body)


def _is_called_by_users(spec):
    header = _IN_KERNELS / f"{spec.collective}.cuh"
    return header.is_file() and re.search(rf"\b{spec.constant}\b", header.read_text())


def _made_by_users(spec):
    element, types = _types(spec)
    arguments = f", output_of<{element}>(call), input_of<{element}>(call), call.count"
    arguments += ", call.peer" if spec.takes else ""
    return _MADE_BY_USERS.format(
        constant=spec.constant,
        name=f"{spec.collective}{types}",
        arguments="" if spec.counts is Counts.EVENTS else arguments,
    )
