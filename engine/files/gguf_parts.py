"""Reads a model in one GGUF file, or in several: NAME-00001-of-00002.gguf and so on."""

import re
from collections.abc import Sequence
from pathlib import Path

import kccl

from ..formats.base import Stored
from .gguf_file import GgufFile, Tensor

_NAME = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NUM_TENSORS = "split.tensors.count"
# The largest number of parts, because file names have five digits for it. A damaged file may give
# any number.
_MAX_PARTS = 99_999
_MAX_TENSORS = 2**31 - 1


class GgufParts:
    """All parts of a model in GGUF files.

    Attributes:
        path: The first part, which has the metadata.
        files: All parts.
        metadata: Values by key, as GgufFile.metadata.
        tensors: Tensors of all parts by name.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file, and the other parts if the model has several. `path` may be any part.

        Raises:
            kccl.Error: A part is missing or damaged, or belongs to another model.
        """
        self._files: list[GgufFile] = []
        self._holders: dict[str, GgufFile] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            opened = self._open(path)
            count = _number(opened, "split.count", 1)
            if count > 1:
                others = _paths(path, _number(opened, "split.no", 0), count)
                for number, other in enumerate(others):
                    file = opened if other == path else self._open(other)
                    _check_part(file, number, count)
                    self._take(file)
                self._files.sort(key=lambda file: others.index(file.path))
                self._check_count()
            else:
                self._take(opened)
        except BaseException:
            self.close()
            raise
        self.path = self._files[0].path
        self.files = {file.path for file in self._files}
        self.metadata = self._files[0].metadata

    def _open(self, path: Path) -> GgufFile:
        file = GgufFile(path)
        self._files.append(file)
        return file

    def _take(self, file: GgufFile) -> None:
        for name, tensor in file.tensors.items():
            if name in self.tensors:
                raise kccl.Error(
                    f"{file.path}: tensor {name} is in {self._holders[name].path.name} too"
                )
            self.tensors[name] = tensor
            self._holders[name] = file

    def _check_count(self) -> None:
        first = self._files[0]
        wanted = _number(first, _NUM_TENSORS, len(self.tensors))
        if wanted != len(self.tensors):
            raise kccl.Error(
                f"{first.path}: the parts have {len(self.tensors)} tensors, must have {wanted} by "
                f"key {_NUM_TENSORS}"
            )

    def file_of(self, name: str) -> Path:
        """Returns the part that holds a tensor; the first part if none does."""
        return self._holders.get(name, self._files[0]).path

    def read(self, name: str, start: int, stop: int) -> Stored:
        """Calls GgufFile.read() of the part that holds the tensor."""
        return self._holders[name].read(name, start, stop)

    def read_rows(self, name: str, start: int, stop: int) -> Stored:
        """Calls GgufFile.read_rows() of the part that holds the tensor."""
        return self._holders[name].read_rows(name, start, stop)

    def close(self) -> None:
        """Closes all parts. May be called again."""
        for file in self._files:
            file.close()


def _number(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    most = _MAX_TENSORS if key == _NUM_TENSORS else _MAX_PARTS
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise kccl.Error(f"{file.path}: key {key} is {value!r}, must be from 0 to {most}")
    return value


def _paths(path: Path, number: int, count: int) -> Sequence[Path]:
    """Returns the paths of all parts, from the name of one part."""
    told = f"{path} is part {number + 1} of {count}"
    found = _NAME.fullmatch(path.name)
    if found is None or (int(found["number"]), int(found["count"])) != (number + 1, count):
        raise kccl.Error(
            f"{told}, must have a name that ends in -{number + 1:05}-of-{count:05}.gguf, so that "
            "the other parts are found"
        )
    paths = [
        path.with_name(f"{found['name']}-{each + 1:05}-of-{count:05}.gguf") for each in range(count)
    ]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise kccl.Error(f"{told}, and {missing[0]}{more} is missing beside it")
    return paths


def _check_part(file: GgufFile, number: int, count: int) -> None:
    found = (_number(file, "split.no", 0), _number(file, "split.count", 1))
    if found != (number, count):
        raise kccl.Error(
            f"{file.path} is part {found[0] + 1} of {found[1]}, must be part {number + 1} of "
            f"{count} by its name"
        )
