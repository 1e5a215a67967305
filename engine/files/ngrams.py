"""Files of tables of n-grams (model/ngrams.py).

A file has 8 bytes that name its kind, two numbers of 32 bits, which are the number of the model's
ids and the bits of a slot's number, and the table's words. All numbers have their lowest byte
first.
"""

import os
import struct
import tempfile
from pathlib import Path

import numpy as np

import kccl

from ..model.ngrams import MOST_ID_BITS, MOST_SLOT_BITS, Ngrams

_MAGIC = b"kcclngr1"
_HEAD = struct.Struct("<8sII")
_NAME = "kccl-ngrams.bin"


def ngrams_file(model: Path) -> Path:
    """Returns where a model's table is: in its folder, or beside its GGUF file."""
    return model / _NAME if model.is_dir() else model.with_suffix(f".{_NAME}")


def read_ngrams(path: Path, vocab_size: int) -> Ngrams:
    """Reads a table for a model with so many ids.

    Raises:
        kccl.Error: The file cannot be read, is no such table, or is that of another model.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise kccl.Error(f"cannot read {path}: {error.strerror}") from error
    kind, size, slot_bits = _HEAD.unpack(data[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    is_table = kind == _MAGIC and 1 <= slot_bits <= MOST_SLOT_BITS and 0 < size < 1 << MOST_ID_BITS
    if not is_table or len(data) != _HEAD.size + (4 << slot_bits):
        raise kccl.Error(f"{path} is no table of n-grams, or is damaged: make it by `kccl drafts`")
    if size != vocab_size:
        raise kccl.Error(
            f"{path} is a table of n-grams for a model of {size} ids, and this one has {vocab_size}"
        )
    words = np.frombuffer(data, "<u4", offset=_HEAD.size).astype(np.uint32)
    found = Ngrams(words, size)
    if int((words & np.uint32((1 << found.id_bits) - 1)).max()) > size:
        raise kccl.Error(f"{path} is damaged: it has an id that the model does not have")
    return found


def write_ngrams(path: Path, table: Ngrams) -> None:
    """Writes a table. A file that was there is replaced only by a whole one.

    Raises:
        kccl.Error: The file cannot be written.
    """
    head = _HEAD.pack(_MAGIC, table.vocab_size, table.slot_bits)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".aside-", delete=False) as file:
            try:
                file.write(head + table.words.astype("<u4").tobytes())
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise kccl.Error(f"cannot write {path}: {error.strerror}") from error
