"""Divides answers in harmony, gpt-oss's format, whose messages belong to channels.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>

The prompt ends with "<|start|>assistant". A header names a message's channel: "analysis" has
thoughts, and "final" the answer. "commentary" has calls of tools, whose header names a recipient as
in "to=functions.weather", and text for the user that announces a call.
"""

import re
from collections.abc import Mapping
from typing import Any

from .parts import Part

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
"""The markers that may end a message."""
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
"""All control tokens of the format."""
AUTHOR = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
"""The prefix of a call's recipient. The function's name follows."""

# Recipients that are no tools. Messages to them are text.
_NOBODY = ("", "all", "user", AUTHOR)
# The most characters of a header. Longer text counts as no header.
_LONGEST_HEADER = 256
_PARAGRAPH = "\n\n"


def is_in(source: str) -> bool:
    """Tells whether a chat template writes harmony."""
    return CHANNEL in source and MESSAGE in source


def with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in the form that gpt-oss's template takes. In a message with calls the
    template refuses both thoughts and a content. So the content is appended to the thoughts.
    """
    thought, content = message.get("thinking"), message.get("content")
    if not (message.get("tool_calls") and thought and content):
        return dict(message)
    if not isinstance(thought, str) or not isinstance(content, str):
        return dict(message)
    thought = f"{thought}{_PARAGRAPH}{content}"
    return {**message, "content": "", "thinking": thought, "reasoning_content": thought}


def _header(end: str) -> re.Pattern[str]:
    """Returns a pattern of headers whose white space was replaced by single blanks.

    Args:
        end: What is appended to each character in the pattern. If empty, the pattern matches whole
            headers. If it is an alternative for the text's end, beginnings of headers match, too.
    """

    def spelt(text: str) -> str:
        return "".join(f"(?:{re.escape(character)}{end})" for character in text)

    def word(name: str, letters: str) -> str:
        return f"(?P<{name}>(?:{letters}+{end}))"

    blank, begin, kinds = " ?", spelt(CHANNEL), r"[\w.+/-]"
    channel = f"(?:{'|'.join(map(spelt, (ANALYSIS, COMMENTARY, FINAL)))})"
    to, letters = f"{blank}{spelt('to=')}", r"[^ <]"
    parts = (
        f"{blank}(?:{spelt(START)})?{blank}(?:{spelt(AUTHOR)})?",
        f"(?:{to}{word('first', letters)})?{blank}",
        # Small models write the beginning of a header twice. The first one is skipped.
        f"(?:{begin}{blank}{channel}(?:{to}(?:{letters}+{end}))?{blank}(?={begin}))?",
        f"(?:(?:{begin})?{blank}(?P<channel>{channel})(?:{to}{word('second', letters)})?",
        f"(?:{spelt(' ')}(?:{kinds}+{end}))?)?",
        f"(?:{blank}{spelt(CONSTRAIN)}{blank}{word('type', kinds)})?{blank}{spelt(MESSAGE)}",
    )
    return re.compile("".join(parts))


_HEADER, _BEGUN = _header(""), _header(r"|\Z")


class Harmony:
    """A Divider (parts.py) for answers in harmony. Text that should be a header but is none counts
    as text of the answer. So does a message to a tool, with its header, because the reader of calls
    must find it in the answer. Messages of the same kind are separated as paragraphs.
    """

    def __init__(self, prompt_end: str = "") -> None:
        """Begins before the first text of the answer.

        Args:
            prompt_end: The end of the prompt, from its last START on. "" if it has no START. It may
                have a part of the answer's header.
        """
        self._parts: list[Part] = []
        # The text that is not decided yet: it may be a marker, or a header after self._end.
        self._held = ""
        # The marker that ended the message before this header. "" if there is none.
        self._end = ""
        # The beginning of the answer's first header, if the prompt has it.
        self._given = ""
        self._is_thought = self._is_call = False
        self._is_new, self._has_said = True, {True: False, False: False}
        self._is_in_header = True
        self.push(prompt_end)
        self._parts.clear()
        self._has_said = {True: False, False: False}
        if self._is_in_header:
            self._given = self._held.removeprefix(self._end)
            self._end, self._is_thought = "", False
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        """See Divider."""
        return self._is_thought and not self._is_in_header

    def push(self, text: str) -> list[Part]:
        """See Divider."""
        for character in text:
            self._take(character)
        return self._taken()

    def finish(self) -> list[Part]:
        """See Divider. An incomplete header at the answer's end is dropped."""
        if self._is_in_header:
            begun = self._held.removeprefix(self._end)
            has_marker = any(marker in begun for marker in MARKERS)
            is_nothing = not begun.strip() and (self._end or self._is_call)
            if has_marker or is_nothing:
                self._held = ""
            else:
                self._refuse()
        self._give(self._held)
        self._held = ""
        return self._taken()

    def _take(self, character: str) -> None:
        self._held += character
        if self._is_in_header:
            self._look_at_header()
            return
        markers = (*ENDS, START)
        while self._held and not any(marker.startswith(self._held) for marker in markers):
            first, self._held = self._held[0], self._held[1:]
            self._give(first)
        if self._held in ENDS and self._is_call:
            # The marker stays in the answer's text, because the reader of calls needs it.
            self._give(self._held)
            self._is_in_header, self._held, self._end = True, "", ""
        elif self._held in markers:
            self._is_in_header = True
            self._end = self._held if self._held in ENDS else ""

    def _look_at_header(self) -> None:
        text = self._given + self._held.removeprefix(self._end)
        if len(text) <= _LONGEST_HEADER:
            text = re.sub(r"\s+", " ", text)
            if found := _HEADER.fullmatch(text):
                self._begin(found)
                return
            if _BEGUN.fullmatch(text):
                return
        self._refuse()

    def _begin(self, header: re.Match[str]) -> None:
        """Begins a message."""
        recipient = header["second"] or header["first"] or ""
        channel, kind = header["channel"] or "", header["type"] or ""
        self._is_call = recipient not in _NOBODY
        self._is_thought = channel == ANALYSIS and not self._is_call
        self._is_in_header, self._is_new = False, True
        self._held = self._end = self._given = ""
        if self._is_call:
            between = f"{CHANNEL}{channel}" if channel else ""
            of_kind = f" {CONSTRAIN}{kind}" if kind else ""
            self._give(f"{START}{AUTHOR} to={recipient}{between}{of_kind}{MESSAGE}")

    def _refuse(self) -> None:
        """Must be called when the held text turns out to be no header. Adds it as text: to the
        message if that has not ended, else to the answer.
        """
        text, end = self._held, self._end
        self._held = self._end = self._given = ""
        self._is_in_header = False
        if self._is_thought and end:
            # The end marker has ended the thoughts. So the text belongs to the answer.
            text, end = text.removeprefix(end), ""
            self._is_thought, self._is_new = False, True
        # A call's arguments may contain START. Then the call goes on.
        self._is_call = self._is_call and text.startswith(START)
        # Adds the first marker as text, and examines the rest again, which may have a marker.
        first = end or (START if text.startswith(START) else "")
        self._give(first)
        for character in text.removeprefix(first):
            self._take(character)

    def _give(self, text: str) -> None:
        """Adds text to the message."""
        if not text:
            return
        kind = self._is_thought
        if self._is_new and self._has_said[kind]:
            text = _PARAGRAPH + text
        self._is_new, self._has_said[kind] = False, True
        if self._parts and self._parts[-1].is_thought == kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
