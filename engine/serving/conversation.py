"""Runs a conversation with a chat model: keeps its messages, and asks for the next answer."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

from ..text.pieces import Piece
from ..text.reasoning import answer_in, shown_in_chats
from ..text.tokenizer import Tokenizer
from .submission import Submission


class Conversation:
    """The messages of a conversation. At each turn the engine runs only the new tokens, as long as
    its KV cache keeps the turns before. A context manager, which cancels the running answer.

    Attributes:
        messages: All messages so far. Each has "role" and "content". The caller may change them
            between two turns. Answers in harmony are kept without thoughts and headers.
        ids: The ids of the newest answer's prompt.
        tokenizer: The model's tokenizer.
    """

    def __init__(
        self,
        submit: Callable[..., Submission[Piece]],
        tokenizer: Tokenizer,
        system: str | None,
        variables: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> None:
        """Begins a conversation.

        Args:
            submit: Engine.submit.
            tokenizer: Turns messages into the ids of a prompt.
            system: The system's message, or None.
            variables: Variables of the chat template, by name.
            given: Fields of SamplingParams for all answers.
        """
        self._submit, self.tokenizer = submit, tokenizer
        self._system = system
        self._variables = dict(variables)
        self._given = dict(given)
        self._running: Submission[Piece] | None = None
        self.messages: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.reset()

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.cancel()

    def reset(self) -> None:
        """Forgets all messages but the system's."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def stream(self, text: str, **given: Any) -> Generator[Piece, None, None]:
        """Sends the next message, and yields the answer piece by piece, as the model writes it. If
        the caller closes the iterator, the answer ends, and the conversation keeps its beginning.

        Args:
            text: The message.
            given: Fields of SamplingParams for this answer. They override the conversation's.

        Raises:
            InvalidArgument, kccl.Error: As Engine.submit(). If no piece has come, the conversation
                does not keep the message.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        self.ids = self.tokenizer.chat(asked, literal=True, **self._variables)
        shown = shown_in_chats(self.tokenizer)
        self._running = self._submit(self.ids, shown=shown, **self._given | given)
        parts: list[str] = []
        try:
            with self._running:
                for piece in self._running:
                    parts.append(piece.text)
                    yield piece
        finally:
            if parts:
                self.messages = [*asked, {"role": "assistant", "content": self._kept(parts)}]

    def ask(self, text: str, **given: Any) -> str:
        """Sends the next message, and returns the whole answer, as `messages` keeps it. Arguments
        and errors are those of stream().
        """
        return self._kept([piece.text for piece in self.stream(text, **given)])

    def _kept(self, parts: list[str]) -> str:
        return answer_in(self.tokenizer, self.ids, "".join(parts))
