"""Reads what AMD's compiled code says about its kernels.

Compiled code is an ELF file. One of its notes has the kernels' descriptions in MessagePack (LLVM's
User Guide for AMDGPU Backend, "Code Object V3 and Above Metadata").
"""

import struct
from typing import Any

from ..base.errors import BackendError

_PT_NOTE = 4
_NT_AMDGPU_METADATA = 32
_OWNER = b"AMDGPU"

Parameters = tuple[tuple[int, int], ...]
"""(offset, bytes) of each parameter of a kernel."""


def parameters(code: bytes) -> dict[str, Parameters]:
    """Returns the parameters of each kernel by its mangled name, without those that the compiler
    added.

    Raises:
        BackendError: `code` is no compiled code for AMD's GPUs.
    """
    try:
        described = _Reader(_metadata(code)).value()
        return {
            kernel[".name"]: tuple(
                (argument[".offset"], argument[".size"])
                for argument in kernel.get(".args", ())
                if not argument[".value_kind"].startswith("hidden_")
            )
            for kernel in described["amdhsa.kernels"]
        }
    except (struct.error, LookupError, TypeError, UnicodeDecodeError) as error:
        raise BackendError(f"the compiled code's metadata cannot be read: {error!r}") from error


def _metadata(code: bytes) -> bytes:
    if code[:4] != b"\x7fELF":
        raise BackendError("the compiled code is no ELF file")
    (parts_at,) = struct.unpack_from("<Q", code, 32)
    part_bytes, num_parts = struct.unpack_from("<HH", code, 54)
    for index in range(num_parts):
        kind, _, begin, _, _, size = struct.unpack_from(
            "<IIQQQQ", code, parts_at + index * part_bytes
        )
        if kind != _PT_NOTE:
            continue
        at = begin
        while at + 12 <= begin + size:
            name_bytes, data_bytes, note = struct.unpack_from("<III", code, at)
            name_at, at = at + 12, at + 12 + _rounded(name_bytes)
            name = code[name_at : name_at + name_bytes].rstrip(b"\0")
            if note == _NT_AMDGPU_METADATA and name == _OWNER:
                return code[at : at + data_bytes]
            at += _rounded(data_bytes)
    raise BackendError("the compiled code has no metadata of its kernels")


def _rounded(size: int) -> int:
    return -(-size // 4) * 4


class _Reader:
    """Reads the types of MessagePack that such metadata has."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self) -> Any:
        kind = self._number("B")
        if kind < 0x80:
            return kind
        if kind < 0x90:
            return self._map(kind & 0x0F)
        if kind < 0xA0:
            return self._array(kind & 0x0F)
        if kind < 0xC0:
            return self._text(kind & 0x1F)
        if kind >= 0xE0:
            return kind - 0x100
        simple = {0xC0: None, 0xC2: False, 0xC3: True}
        if kind in simple:
            return simple[kind]
        numbers = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i"}
        numbers |= {0xD3: "q", 0xCA: "f", 0xCB: "d"}
        if kind in numbers:
            return self._number(numbers[kind])
        lengths = {0xD9: "B", 0xDA: "H", 0xDB: "I", 0xDC: "H", 0xDD: "I", 0xDE: "H", 0xDF: "I"}
        length = int(self._number(lengths[kind]))
        if kind <= 0xDB:
            return self._text(length)
        return self._array(length) if kind <= 0xDD else self._map(length)

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(form)
        return number

    def _text(self, length: int) -> str:
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _array(self, length: int) -> list[Any]:
        return [self.value() for _ in range(length)]

    def _map(self, length: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(length)}
