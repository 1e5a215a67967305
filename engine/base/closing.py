"""A base class for the engine's objects that must be closed."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that calls close() at the context's end."""

    @abstractmethod
    def close(self) -> None:
        """Closes the object. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
