"""The common part of all formats of calls: a marker separates text from the call behind it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from ...text.markers import Marker
from .events import Arguments, CallBegins, CallEnds, Event, Text, merged
from .objects import CallObject


class CallReader(ABC):
    """Finds the calls in an answer, as its text comes. It does not matter how the text is cut. A
    supposed call that proves to be none before its function is known counts as text. White space in
    front of a call, or behind the last one, belongs to neither.
    """

    marker: ClassVar[str]
    """What stands in front of a call."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str], most: int | None) -> None:
        """Begins before the first text of an answer.

        Args:
            names: The functions that there are.
            new_id: Makes a call's id.
            most: The most calls to report; later ones are dropped. None: all are reported.
        """
        self.names = frozenset(names)
        self._new_id, self._most = new_id, most
        self._before = Marker(self.marker)
        self._events: list[Event] = []
        self._written: list[str] = []
        self.call = CallObject()
        self._num_calls = 0
        self.behind = ""
        """What came behind a call, or in front of the answer, while nothing is known of it."""
        self._is_known = False
        self.take: Callable[[str], None] = self.in_text
        """Takes the next character, by what the answer is at."""

    def push(self, text: str) -> list[Event]:
        """Returns the events that this text completes."""
        for character in text:
            self.take(character)
        return self._given()

    def finish(self) -> list[Event]:
        """Returns the text that was kept back, at the answer's end."""
        if self._written:
            self.refuse()
        self.give_back()
        rest = self._before.held
        # White space behind a call is no part of the answer.
        if not self._num_calls or rest.strip():
            self._events.append(Text(rest))
        self._before.clear()
        return self._given()

    # ---- for formats -----------------------------------------------------------------------------

    @abstractmethod
    def opened(self) -> None:
        """Called when the marker has come. Sets `take` to the function that reads what follows."""

    @abstractmethod
    def closed(self) -> None:
        """Called when a call has ended. Sets `take` to the function that reads what follows."""

    def in_text(self, character: str) -> None:
        """Takes text."""
        found = self._before.take(character)
        if found is None:
            self.write(self._before.held)
            self._before.clear()
            self.opened()
        elif found:
            self._events.append(Text(found))

    def write(self, text: str) -> None:
        """Keeps the text of a call, in case it proves to be no call."""
        self._written.append(text)

    def begin_object(self, names: Collection[str] | None = None, head: str = "") -> None:
        """Called when a call's object begins with the next character.

        Args:
            names: The names of the functions; None: any name.
            head: The beginning of an object in the usual form, which the model does not write.
        """
        self.call, self._is_known = CallObject(names), False
        for each in head:
            self.call.take(each)
        self.take = self.in_object

    def in_object(self, character: str) -> None:
        """Takes a character of a call's object."""
        call = self.call
        if not call.take(character):
            self.refuse()
            self.take(character)
            return
        self.write(character)
        for each in self.unwritten():
            call.take(each)
        self._tell()
        if call.is_done:
            if call.is_whole:
                self._end(is_whole=True)
                self.closed()
            else:
                # The character that ends it is text too.
                self.refuse()

    def unwritten(self) -> str:
        """Returns the characters that an object of the usual form would have here, though the model
        does not write them.
        """
        return ""

    def refuse(self) -> None:
        """Called when the model's text is no call. It counts as text."""
        if self._is_known:
            self._end(is_whole=False)
        else:
            self._events.append(Text("".join(self._written)))
        self._written.clear()
        self.take = self.in_text

    def give_back(self, character: str = "") -> None:
        """Called when text follows a call. What was kept back is text, and so is this character."""
        text, self.behind = self.behind + character, ""
        self.take = self.in_text
        for each in text:
            self.take(each)

    # ---- events ----------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Reports the new parts of the call."""
        call, index = self.call, self._num_calls
        if call.name and not self._is_known:
            self._is_known = True
            self._events.append(CallBegins(index, self._new_id(), call.name))
        if text := call.new_arguments():
            self._events.append(Arguments(index, text))

    def _end(self, is_whole: bool) -> None:
        written = "".join(self._written)
        self._events.append(CallEnds(self._num_calls, is_whole, written))
        self._num_calls += 1
        self._is_known = False
        self._written.clear()

    def _given(self) -> list[Event]:
        events = [each for each in merged(self._events) if self._is_wanted(each)]
        self._events.clear()
        return events

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, CallBegins | Arguments | CallEnds):
            return self._most is None or event.index < self._most
        return not isinstance(event, Text) or bool(event.text)
