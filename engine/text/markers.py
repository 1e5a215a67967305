"""Finds a marker in text that comes in pieces."""


class Marker:
    """Waits for a marker, character by character, so that it does not matter how the text is cut.

    White space in front of the marker is kept back with it.
    """

    def __init__(self, text: str) -> None:
        """Waits for a text, which must not be empty."""
        self._text = text
        self._space: list[str] = []
        # The text that may be the beginning of the marker.
        self._begun = ""

    @property
    def held(self) -> str:
        """Returns the text that is kept back."""
        return "".join(self._space) + self._begun

    def take(self, character: str) -> str | None:
        """Returns the text that is certainly neither the marker nor white space in front of it; it
        may be empty. Returns None when the marker is complete. Then `held` ends with the marker,
        and clear() begins anew.
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
        """Forgets the text that is kept back."""
        self._space.clear()
        self._begun = ""
