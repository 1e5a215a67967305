"""Finds calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from .reader import CallReader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(CallReader):
    """A CallReader for Hermes and Qwen. A call without </tool_call> counts, too."""

    marker = BEGIN

    def opened(self) -> None:
        """See CallReader."""
        self.begin_object()

    def closed(self) -> None:
        """See CallReader."""
        self.take = self._in_end

    def _in_end(self, character: str) -> None:
        begun = (self.behind + character).lstrip()
        if not END.startswith(begun):
            self.give_back(character)
        elif begun == END:
            self.behind = ""
            self.take = self.in_text
        else:
            self.behind += character
