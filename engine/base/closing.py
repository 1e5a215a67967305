"""What the engine's objects that must be closed have in common."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that closes itself at its end."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
