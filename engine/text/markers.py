"""Finds a marker in text that comes in pieces."""


class Marker:
    """Searches for a marker character by character, so that a marker may be cut into pieces.

    Holds back text that may be the marker, and white space in front of it.
    """

    def __init__(self, text: str) -> None:
        """Begins to search for the marker `text`, which must not be empty."""
        self._text = text
        self._space: list[str] = []
        # The text that may be the beginning of the marker.
        self._begun = ""

    @property
    def held(self) -> str:
        """Returns the text that is held back."""
        return "".join(self._space) + self._begun

    def take(self, character: str) -> str | None:
        """Adds a character. Returns the text that cannot be the marker or white space in front of
        it any more; it may be "". Returns None when the marker is complete. Then `held` ends with
        the marker, and the caller must call clear() before the next search.
        """
        self._begun += character
        free: list[str] = []
        while not self._text.startswith(self._begun):
            first, self._begun = self._begun[0], self._begun[1:]
            self._space.append(first)
            if not first.isspace():
                free += self._space
                self._space.clear()
        return None if self._begun == self._text else "".join(free)

    def clear(self) -> None:
        """Drops the text that is held back, and begins a new search."""
        self._space.clear()
        self._begun = ""
