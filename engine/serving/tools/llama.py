"""Finds calls of Llama 3: {"name": ..., "parameters": {...}}, after <|python_tag|> or at the
answer's beginning. Semicolons separate several calls.
"""

from collections.abc import Callable, Collection

from .reader import CallReader

TAG = "<|python_tag|>"


class LlamaReader(CallReader):
    """A CallReader for Llama 3. An object without <|python_tag|> is a call only if its function
    exists. Otherwise it may be an answer in JSON.
    """

    marker = TAG

    def __init__(self, names: Collection[str], new_id: Callable[[], str], most: int | None) -> None:
        """See CallReader."""
        super().__init__(names, new_id, most)
        self._has_tag = False
        self.take = self._at_start

    def opened(self) -> None:
        """See CallReader."""
        self._has_tag = True
        self.take = self._behind_tag

    def closed(self) -> None:
        """See CallReader."""
        self.take = self._between

    def _at_start(self, character: str) -> None:
        if character.isspace():
            self.behind += character
        elif character == "{":
            self._object(character)
        else:
            self.give_back(character)

    def _behind_tag(self, character: str) -> None:
        if character.isspace():
            self.write(character)
        elif character == "{":
            self._object(character)
        else:
            # The tag may also begin a program: the model was trained to write code for an
            # interpreter. That counts as text.
            self.refuse()
            self.take(character)

    def _between(self, character: str) -> None:
        if character.isspace() or character == ";":
            self.behind += character
        elif character == "{" and ";" in self.behind:
            self._object(character)
        else:
            self.give_back(character)

    def _object(self, character: str) -> None:
        self.write(self.behind)
        self.behind = ""
        self.begin_object(None if self._has_tag else self.names)
        self.take(character)
