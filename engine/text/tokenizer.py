"""Converts text to token ids and back."""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import kccl

from ..base.fields import one_line
from .chat import ChatTemplates, Template
from .chat_data import conversation_of, variables_of
from .literal import Literal, escaped

# SentencePiece spells a space with this character.
_SPACE = "\u2581"
# _encode_behind() puts this character in front of a text, so that no space is added to the text.
_ALONE = "\u263a"
# Encoding texts of at least this many characters takes more than milliseconds.
_LONG = 1 << 14


class Pieces(Protocol):
    """How a vocabulary spells bytes: byte_level or sentence_piece."""

    def __call__(self, token: str) -> bytes:
        """Returns the bytes that a token of the vocabulary stands for."""


def byte_level(token: str) -> bytes:
    """Returns the bytes of a token in GPT-2's spelling: each character stands for one byte."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def sentence_piece(token: str) -> bytes:
    """Returns the bytes of a token in SentencePiece's spelling: text, or one byte as in
    "<0x0A>".
    """
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet, character -> byte. Printable bytes of Latin-1 stand for themselves.
    The others are the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        bos_id, pad_id: The ids of BOS and of the padding token; None: there is no such token.
        eos_ids: Ids that end a text; the model's own end of text first. Some may have no token.
        special_ids: The ids of control tokens. They decode to no text.
        vocab_size: All ids are below this. A model may have more ids, which decode to no text.
        prefix, suffix: Ids that encode() puts before and after a text, as in the model's training.
        adds_bos: Whether bos_id is in the prefix.
    """

    def __init__(
        self,
        backend: Any,
        *,
        pieces: Pieces,
        where: Path,
        bos_id: int | None,
        eos_ids: Sequence[int],
        pad_id: int | None,
        prefix: Sequence[int],
        suffix: Sequence[int],
        adds_space: bool,
        templates: Mapping[str, Template],
        texts: Mapping[str, str],
        begins_chats: bool = False,
    ) -> None:
        """Wraps a tokenizer of the `tokenizers` library.

        Args:
            backend: A tokenizers.Tokenizer.
            pieces: How its vocabulary spells bytes.
            where: The file, for messages.
            bos_id, eos_ids, pad_id, prefix, suffix: See the attributes. All but eos_ids must be in
                the vocabulary.
            adds_space: Whether the backend puts a space in front of a text.
            templates: Name -> chat template.
            texts: Variable of templates, as "bos_token" -> the token's text.
            begins_chats: Whether chat() adds the prefix if a template does not write it.
        """
        self._backend = backend
        self._pieces = pieces
        self._where = where
        self.vocab_size = vocab_size_of(backend)
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.pad_id = pad_id
        self.prefix, self.suffix = tuple(prefix), tuple(suffix)
        self.adds_bos = bos_id is not None and bos_id in self.prefix
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._literal = Literal(token.content for token in added.values() if token.special)
        self._adds_space = adds_space
        self._templates = ChatTemplates(templates, texts)
        self._begins_chats = begins_chats
        # Added tokens have their plain text in the vocabulary, not the spelling of `pieces`.
        self._bytes = {
            number: b"" if token.special else token.content.encode()
            for number, token in added.items()
        }

    def fit(self, rows: int, source: Path) -> None:
        """Checks the ids against the embedding's rows. Drops eos_ids and pad_id that have no row:
        tokens that were added to a tokenizer, as padding often is, may lack one.

        Raises:
            kccl.Error: The vocabulary without added tokens has more ids than there are rows, or an
                id of the prefix or suffix has no row.
        """
        size = vocab_size_of(self._backend, with_added=False)
        if size > rows:
            raise kccl.Error(
                f"{source}: the tokenizer has {size} ids, must have at most {rows}, the rows of "
                "the embedding"
            )
        for number in (*self.prefix, *self.suffix):
            if number >= rows:
                raise kccl.Error(
                    f"{source}: texts begin or end with id {number}, must be below {rows}, the "
                    "rows of the embedding"
                )
        self.eos_ids = tuple(number for number in self.eos_ids if number < rows)
        if self.pad_id is not None and self.pad_id >= rows:
            self.pad_id = None

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Returns the ids of a text. Control tokens that are spelt out in it become one id each.

        Args:
            text: Any text.
            add_bos: Whether to add the suffix, and the prefix unless the text begins with it. In
                most models the prefix is BOS or nothing.

        Raises:
            InvalidArgument: The text has a character that UTF-8 cannot encode: a surrogate, as
                text decoded from invalid UTF-8 has.
        """
        check_utf8(text)
        if len(text) < _LONG:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        else:
            # encode_batch_fast() releases the GIL meanwhile. encode() does not.
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            ids = found.ids
        return [*self._begun(ids), *self.suffix] if add_bos else ids

    def encode_literal(self, text: str, *, follows: bool = False) -> list[int]:
        """Returns the ids of a text in which control tokens that are spelt out stay text.

        Args:
            text: Any text.
            follows: Whether the text follows other text, so that no space is added in front.

        Raises:
            InvalidArgument: As encode().
        """
        (given,), mark = self._literal.marked([text])
        ids: list[int] = []
        for part in given.split(mark) if mark else [given]:
            ids += self._encode_behind(part) if follows else self.encode(part, add_bos=False)
            follows = True
        return ids

    def _encode_behind(self, text: str) -> list[int]:
        """Returns the ids of a text that follows other text."""
        if not self._adds_space:
            return self.encode(text, add_bos=False)
        # No token has _ALONE beside other characters. So the ids of _ALONE can be cut off.
        front, whole = (self.encode(_ALONE + each, add_bos=False) for each in ("", text))
        return whole[len(front) :]

    def _begun(self, ids: list[int]) -> list[int]:
        """Returns the ids with the prefix in front, unless they already begin with it."""
        has_it = tuple(ids[: len(self.prefix)]) == self.prefix
        return ids if has_it else [*self.prefix, *ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Bytes that are no UTF-8 become U+FFFD. Undoes encode(): removes
        the space that it added.

        Args:
            ids: The ids.
            skip_special_tokens: Whether control tokens are left out. If False, their names are
                written.

        Raises:
            InvalidArgument: An id is negative.
        """
        named = frozenset[int]() if skip_special_tokens else self.special_ids
        spelt = b"".join(
            self.name_of(each).encode() if each in named else self.bytes_of(each) for each in ids
        )
        if self._adds_space and self._pieces is not byte_level:
            spelt = spelt.removeprefix(b" ")
        return spelt.decode(errors="replace")

    def stream(self, shown: Collection[int] = ()) -> "TextStream":
        """Makes a TextStream, which decodes ids one by one, as text that follows a prompt.

        Args:
            shown: Ids of control tokens that decode to their names, from control_ids().
        """
        return TextStream(self, shown)

    def bytes_of(self, number: int) -> bytes:
        """Returns the bytes that an id stands for; none for control tokens and ids without a
        token.
        """
        found = self._bytes.get(number)
        if found is None:
            if number < 0:
                raise kccl.InvalidArgument(f"id {number} is negative")
            token = self._backend.id_to_token(number) if number < self.vocab_size else None
            found = b"" if token is None else self._pieces(token)
            self._bytes[number] = found
        return found

    def name_of(self, number: int) -> str:
        """Returns the vocabulary's spelling of an id, as in "<|im_end|>"; "" for an id without a
        token.
        """
        token: str | None = self._backend.id_to_token(number)
        return token or ""

    def id_of(self, name: str) -> int | None:
        """Returns the id with this spelling in the vocabulary; None if there is none."""
        found: int | None = self._backend.token_to_id(name)
        return found

    def control_ids(self, names: Iterable[str]) -> tuple[int, ...]:
        """Returns the ids of those names that are control tokens of this vocabulary."""
        found = {number for name in names if (number := self.id_of(name)) is not None}
        return tuple(sorted(found & self.special_ids))

    @cached_property
    def longest(self) -> int:
        """Returns an upper bound of the number of characters of a token's text."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Tells whether the model has a chat template."""
        return bool(self._templates)

    def template_source(self, *, with_tools: bool = False) -> str:
        """Returns the source of the chat template that chat() uses, with tools or without; "" if
        the model has none.
        """
        return self._templates.source(with_tools=with_tools)

    def takes_tools(self) -> bool:
        """Tells whether the chat template uses tools."""
        return self._templates.takes_tools()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        literal: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Returns the ids of a conversation by the model's chat template, ready for
        Engine.stream().

        Args:
            messages: Each has "role" ("system", "user", "assistant" or "tool") and "content"; as
                mappings, dataclasses or models of pydantic.
            add_generation_prompt: Whether the ids end with the header of the model's answer.
            template: Name of one of several templates; None: "tool_use" with tools, else "default".
            literal: Whether control tokens that are spelt out in messages and tools stay text. Must
                be True if people who are not trusted write these. If False, each becomes one id.
            variables: `tools`, a list of functions or of their JSON schemas, `documents`, a list of
                objects, and the template's own variables, as in `enable_thinking=False`.

        Raises:
            InvalidArgument: The messages are no list, a message lacks its role, there is no such
                template, or it does not use a variable.
            kccl.Error: The model has no template, or the template raises an error.
        """
        mark = ""
        if literal:
            given = conversation_of(messages), (variables := variables_of(variables)).get("tools")
            (messages, tools), mark = self._literal.marked(given)
            variables |= {"tools": tools} if "tools" in variables else {}
        text = self.chat_text(
            messages, add_generation_prompt=add_generation_prompt, template=template, **variables
        )
        if mark:
            # A template may have escaped the mark, because it is not ASCII.
            text = text.replace(escaped(mark), mark)
        # add_bos=False: the template writes BOS itself. Only for GGUF files it may be missing.
        ids: list[int] = []
        for part in text.split(mark) if mark else [text]:
            ids += self.encode(part, add_bos=False)
        return self._begun(ids) if self._begins_chats else ids

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Returns the text whose ids chat() gives. Arguments and errors are those of chat()."""
        if not self._templates:
            raise kccl.Error(
                f"{self._where} has no chat template: give text, on the command line leave out "
                "--chat"
            )
        return self._templates.render(
            messages, variables, name=template, add_generation_prompt=add_generation_prompt
        )


class TextStream:
    """Decodes ids one by one. A character is returned when all its bytes have come."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, number: int) -> str:
        """Returns the text that this id completes; it may be empty."""
        if number in self._shown:
            return self._decoder.decode(self._tokenizer.name_of(number).encode())
        return self._decoder.decode(self._tokenizer.bytes_of(number))

    def hidden(self, number: int) -> str:
        """Returns the name of a control token that push() gives no text for; "" for other ids."""
        is_hidden = number in self._tokenizer.special_ids and number not in self._shown
        return self._tokenizer.name_of(number) if is_hidden else ""

    def flush(self) -> str:
        """Returns what remains at the end: U+FFFD if a character is incomplete."""
        return self._decoder.decode(b"", final=True)


def vocab_size_of(backend: Any, *, with_added: bool = True) -> int:
    """Returns the largest id of a tokenizers.Tokenizer plus 1. That may be more than the number of
    tokens, because a vocabulary may leave ids out.
    """
    return max(backend.get_vocab(with_added_tokens=with_added).values(), default=-1) + 1


def check_utf8(text: str) -> None:
    """Raises InvalidArgument if the text has a character that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise kccl.InvalidArgument(
            f"the text is not valid UTF-8: character {error.start} is {text[error.start]!a}"
        ) from None


def guarded(where: Path, make: Any, *args: Any) -> Any:
    """Calls the `tokenizers` library, whose failures are exceptions of many types.

    Raises:
        kccl.Error: The call failed.
    """
    try:
        return make(*args)
    except kccl.Error:
        raise
    # The library's panics are no subclass of Exception.
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kccl.Error(f"{where}: the tokenizer is wrong: {one_line(error)}") from error
        raise
