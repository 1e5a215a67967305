"""The base class of what finds calls in an answer, for all formats: a marker precedes each call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from ...text.markers import Marker
from .events import Arguments, CallBegins, CallEnds, Event, Text, merged
from .objects import CallObject


class CallReader(ABC):
    """Finds the calls in an answer while its text comes, in pieces of any length. If what follows a
    marker turns out to be no call before its function is known, it counts as text. White space in
    front of a call, or after the last one, is dropped.
    """

    marker: ClassVar[str]
    """The text in front of a call."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str], most: int | None) -> None:
        """Begins before the first text of an answer.

        Args:
            names: The names of the functions that may be called.
            new_id: Makes the id of a call.
            most: The most calls to report. Later ones are dropped. None: all are reported.
        """
        self.names = frozenset(names)
        self._new_id, self._most = new_id, most
        self._before = Marker(self.marker)
        self._events: list[Event] = []
        self._written: list[str] = []
        self.call = CallObject()
        self._num_calls = 0
        self.behind = ""
        """The text after a call, or at the answer's beginning, of which it is not decided yet
        whether it is text of the answer.
        """
        self._is_known = False
        self.take: Callable[[str], None] = self.in_text
        """The method that reads the next character. It is the state of this reader."""

    def push(self, text: str) -> list[Event]:
        """Adds text. Returns the events that it completes."""
        for character in text:
            self.take(character)
        return self._given()

    def finish(self) -> list[Event]:
        """Returns the last events, with text that was held back. Must be called at the answer's
        end.
        """
        if self._written:
            self.refuse()
        self.give_back()
        rest = self._before.held
        # Drops white space after the last call.
        if not self._num_calls or rest.strip():
            self._events.append(Text(rest))
        self._before.clear()
        return self._given()

    # ---- for formats -----------------------------------------------------------------------------

    @abstractmethod
    def opened(self) -> None:
        """Called at the marker's end. Must set `take` to the method that reads what follows."""

    @abstractmethod
    def closed(self) -> None:
        """Called when a call has ended. Must set `take` to the method that reads what follows."""

    def in_text(self, character: str) -> None:
        """Reads a character of text, which may belong to the marker."""
        found = self._before.take(character)
        if found is None:
            self.write(self._before.held)
            self._before.clear()
            self.opened()
        elif found:
            self._events.append(Text(found))

    def write(self, text: str) -> None:
        """Stores text of a call, which refuse() needs if this turns out to be no call."""
        self._written.append(text)

    def begin_object(self, names: Collection[str] | None = None, head: str = "") -> None:
        """Begins to read a call's object. Must be called before its first character is read.

        Args:
            names: The names that the function may have. None allows any name.
            head: In formats whose object is only the arguments: the text that would precede them
                in an object of the usual form.
        """
        self.call, self._is_known = CallObject(names), False
        for each in head:
            self.call.take(each)
        self.take = self.in_object

    def in_object(self, character: str) -> None:
        """Reads a character of a call's object."""
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
                # The object is no call. All of it is text, including the last character.
                self.refuse()

    def unwritten(self) -> str:
        """Returns the characters that an object of the usual form would have at this point, but
        which the model does not write in this format.
        """
        return ""

    def refuse(self) -> None:
        """Ends a call that turns out to be none. If the call was not reported yet, its text becomes
        text of the answer.
        """
        if self._is_known:
            self._end(is_whole=False)
        else:
            self._events.append(Text("".join(self._written)))
        self._written.clear()
        self.take = self.in_text

    def give_back(self, character: str = "") -> None:
        """Reads the text in `behind`, and then a further character, as text of the answer."""
        text, self.behind = self.behind + character, ""
        self.take = self.in_text
        for each in text:
            self.take(each)

    # ---- events ----------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Adds events for what is new of the call."""
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
