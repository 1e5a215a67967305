"""The interface of the vendors' run-time compilers, which need no GPU and no driver.

An entry of the cache is one line of JSON with the kernels' mangled names, and then the code.
"""

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ..base.errors import BackendError, CompileError
from . import cache
from .headers import Headers


class RuntimeCompiler(ABC):
    """One vendor's compiler, with functions of the same names behind a prefix.

    Attributes:
        name: The compiler's usual name.
        prefix: The prefix of its functions.
        code: The name in the compiler's function Get<code>, which returns the compiled code.
        target: The target of the cache's entries.
        suffix: The suffix of the entries' files.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    code: ClassVar[str]
    target: ClassVar[str]
    suffix: ClassVar[str]

    @property
    @abstractmethod
    def cure(self) -> str:
        """Returns what the user can do if the compiler is missing."""

    @abstractmethod
    def load(self) -> Any:
        """Returns the binding, which has the functions.

        Raises:
            ImportError, RuntimeError: The binding or the compiler is missing.
        """

    @abstractmethod
    def check_arch(self, arch: str) -> None:
        """Checks that the compiler and KCCL support an architecture.

        Raises:
            InvalidArgument: The compiler or KCCL does not support it.
        """

    @abstractmethod
    def flags(self, arch: str) -> list[str]:
        """Returns the compiler's flags, without folders."""

    @abstractmethod
    def version(self) -> str:
        """Returns a text that differs between any two builds of the compiler.

        Raises:
            BackendError: The compiler is not installed.
        """

    @abstractmethod
    def destroy(self, program: Any) -> None:
        """Destroys a program."""

    @cached_property
    def binding(self) -> Any:
        """Returns the result of load(), once it has succeeded."""
        try:
            return self.load()
        except (ImportError, RuntimeError) as error:
            raise BackendError(f"{self.name} cannot be loaded: {error}. {self.cure}") from error

    @cached_property
    def full_name(self) -> str:
        """Returns the name and version.

        Raises:
            BackendError: The compiler is not installed.
        """
        return f"{self.name} {self.version()}"

    def call(self, name: str, *args: Any) -> Any:
        """Calls a function by its name behind the prefix. Returns its results as Table.call() does.

        Raises:
            BackendError: The call failed, or the compiler is not installed.
        """
        code, *results = getattr(self.binding, self.prefix + name)(*args)
        if int(code) != 0:
            raise BackendError(f"{self.prefix}{name} failed: {code.name} ({int(code)})")
        return results[0] if len(results) == 1 else tuple(results) or None

    def compile(
        self,
        source: str,
        kernels: Sequence[str],
        *,
        arch: str,
        name: str = "source",
        include_dirs: Sequence[Path] = (),
        csrc: Path = cache.CSRC,
    ) -> Path:
        """Compiles kernels for a GPU.

        Args:
            source: Text in the dialect of platform.cuh and mem.cuh, or in the vendor's C++.
            kernels: Names or template instances.
            arch: Architecture, as in "sm_90a" or "gfx942".
            name: Name of the source in messages.
            include_dirs: More folders to search for headers.
            csrc: Root of the device headers.

        Returns:
            The path of the entry in the cache, for read().

        Raises:
            InvalidArgument: The compiler does not know the architecture, or KCCL does not support
                it.
            CompileError: The source does not compile. The error has the compiler's log.
            BackendError: The compiler is not installed, or the cache cannot be written to.
        """
        self.check_arch(arch)
        folders = [csrc / "include", *include_dirs]
        flags = [*self.flags(arch), *(f"-I{folder}" for folder in folders)]
        key = self._key(source, kernels, arch, name, flags, folders, None)
        return cache.cached(key, self.suffix, lambda: self._make(source, kernels, name, flags))

    def find(
        self,
        source: str,
        kernels: Sequence[str],
        *,
        arch: str,
        name: str = "source",
        csrc: Path = cache.CSRC,
        folder: Path,
        headers: Headers,
    ) -> Path | None:
        """Returns what compile() would, if it is in the cache; compiles nothing.

        Args:
            source, kernels, arch, name, csrc: See compile().
            folder: The folder of the cache.
            headers: The headers that have been read for other kernels.
        """
        folders = [csrc / "include"]
        flags = [*self.flags(arch), *(f"-I{each}" for each in folders)]
        key = self._key(source, kernels, arch, name, flags, folders, headers)
        return cache.find(key, self.suffix, folder)

    def _key(
        self,
        source: str,
        kernels: Sequence[str],
        arch: str,
        name: str,
        flags: Sequence[str],
        folders: Sequence[Path],
        headers: Headers | None,
    ) -> str:
        return cache.key_of(
            f"// {name}: {json.dumps(list(kernels))}\n{source}",
            target=f"{self.target} {arch}",
            compiler=self.full_name,
            flags=flags,
            include_dirs=folders,
            headers=headers,
        )

    def _make(self, source: str, kernels: Sequence[str], name: str, flags: Sequence[str]) -> bytes:
        program = self.call("CreateProgram", source.encode(), name.encode(), 0, [], [])
        try:
            for kernel in kernels:
                self.call("AddNameExpression", program, kernel.encode())
            options = [flag.encode() for flag in flags]
            try:
                self._compile(program, options)
            except BackendError as error:
                log = self._text(program, "ProgramLog").partition(b"\0")[0]
                told = log.decode(errors="replace").strip()
                raise CompileError(
                    f"{name} does not compile with {self.full_name}:\n{told or error}", log=told
                ) from error
            names = [self.call("GetLoweredName", program, each.encode()) for each in kernels]
            lowered = json.dumps([_text_of(each) for each in names])
            return lowered.encode() + b"\n" + self._text(program, self.code)
        finally:
            self.destroy(program)

    def _compile(self, program: Any, options: Sequence[bytes]) -> None:
        """Calls the function that compiles a program. Ctrl-C works afterwards as before."""
        try:
            self.call("CompileProgram", program, len(options), options)
        finally:
            # NVRTC leaves Python's handlers of these signals with SA_RESTART. Then Ctrl-C would not
            # end a wait for a lock or an event, because the system resumes the wait.
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    signal.siginterrupt(number, True)

    def _text(self, program: object, what: str) -> bytes:
        """Returns what Get<what> returns."""
        buffer = bytearray(self.call(f"Get{what}Size", program))
        self.call(f"Get{what}", program, buffer)
        return bytes(buffer)


def read(path: Path) -> tuple[list[str], bytes]:
    """Returns the kernels' mangled names, and the code, of an entry that compile() returned."""
    names, _, code = path.read_bytes().partition(b"\n")
    return json.loads(names), code


def _text_of(name: Any) -> str:
    # NVIDIA's binding gives bytes, AMD's an object that str() converts.
    return name.decode() if isinstance(name, bytes) else str(name)
