"""The compiler of the tests' hipRTC: compiles a source for the simulator, with warps of 64.

    python compile_sim.py FOLDER

The folder has the files source, name, kernels and options, the last two with one a line. The script
writes `code`, an ELF file for AMD's GPUs whose only part to load is a library for the simulator.
Its kernels are described in the metadata, as AMD's compiler describes them. If the source does not
compile, the script writes `log` and ends with 1.
"""

import ctypes
import re
import struct
import sys
from pathlib import Path

from kccl.base.errors import CompileError
from kccl.jit import cache

EM_AMDGPU, ET_DYN, PT_LOAD, PT_NOTE = 224, 3, 1, 4
NT_AMDGPU_METADATA = 32
HEADER, PART = 64, 56
OPTIONS = re.compile(r"--offload-arch=gfx9\w+|-std=c\+\+20|-O3|-I.+")


class Shape(ctypes.Structure):
    """kccl::sim::ParameterShape."""

    _fields_ = (("num_bytes", ctypes.c_uint32), ("alignment", ctypes.c_uint32))


def pack(value):
    """A value as MessagePack."""
    if isinstance(value, dict):
        items = b"".join(pack(key) + pack(each) for key, each in value.items())
        return struct.pack(">BH", 0xDE, len(value)) + items
    if isinstance(value, list):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(pack, value))
    if isinstance(value, int):
        return bytes([value]) if value < 128 else struct.pack(">BI", 0xCE, value)
    data = value.encode()
    return (
        bytes([0xA0 | len(data)]) + data if len(data) < 32 else b"\xd9" + bytes([len(data)]) + data
    )


def parameters(library, index):
    """The `.args` of a kernel: its own parameters, and a hidden one as the compiler adds."""
    shapes_of = getattr(library, f"kccl_sim_shapes_{index}")
    shapes_of.restype = ctypes.POINTER(Shape)
    found, offset = [], 0
    shapes = shapes_of()
    for shape in iter(shapes[i] for i in range(1000)):
        if shape.alignment == 0:
            break
        offset = -(-offset // shape.alignment) * shape.alignment
        found.append({".offset": offset, ".size": shape.num_bytes, ".value_kind": "by_value"})
        offset += shape.num_bytes
    offset = -(-offset // 8) * 8
    return [*found, {".offset": offset, ".size": 4, ".value_kind": "hidden_block_count_x"}]


def code_object(library, count):
    """The ELF file."""
    loaded = ctypes.CDLL(str(library))
    kernels = [
        {".name": f"kccl_sim_entry_{index}", ".args": parameters(loaded, index)}
        for index in range(count)
    ]
    described = pack({"amdhsa.version": [1, 2], "amdhsa.kernels": kernels})
    note = struct.pack("<III8s", 7, len(described), NT_AMDGPU_METADATA, b"AMDGPU") + described
    code = library.read_bytes()
    at = HEADER + 2 * PART
    ident = b"\x7fELF\x02\x01\x01\x40\x04".ljust(16, b"\0")
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, ET_DYN, EM_AMDGPU, 1, 0, HEADER, 0, 0x4C, HEADER, PART, 2, 0, 0, 0),
    )
    parts = b"".join(
        struct.pack("<IIQQQQQQ", kind, 4, begin, begin, begin, size, size, 4)
        for kind, begin, size in (
            (PT_NOTE, at, len(note)),
            (PT_LOAD, at + len(note), len(code)),
        )
    )
    return header + parts + note + code


def main(folder):
    lines = {name: (folder / name).read_text().splitlines() for name in ("kernels", "options")}
    unknown = [each for each in lines["options"] if not OPTIONS.fullmatch(each)]
    if unknown:
        (folder / "log").write_text(f"unknown options: {unknown}")
        return 1
    folders = [Path(each[2:]) for each in lines["options"] if each.startswith("-I")]
    try:
        library = cache.compile_sim(
            (folder / "source").read_text(),
            lines["kernels"],
            warp_size=64,
            name=(folder / "name").read_text(),
            include_dirs=folders,
        )
    except CompileError as error:
        (folder / "log").write_text(error.log)
        return 1
    (folder / "code").write_bytes(code_object(library, len(lines["kernels"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
