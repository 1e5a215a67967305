"""The text of an answer, and where a stop string cuts it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kccl.engine.model.executor import Token
from kccl.engine.text.pieces import StopText

# Few characters, so that stop strings and their beginnings are found often.
LETTERS = "ab\ufffd"
TEXTS = st.text(LETTERS, max_size=4)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


class Stream:
    """Gives the text of token i, and at the end what was incomplete. Texts among `names`
    are control tokens.
    """

    def __init__(self, texts, rest, names=()):
        self._texts, self._rest, self._names = texts, rest, names

    def push(self, number):
        return "" if self.hidden(number) else self._texts[number]

    def hidden(self, number):
        return self._texts[number] if self._texts[number] in self._names else ""

    def flush(self):
        return self._rest


def pieces_of(texts, stops, rest, names=()):
    """The pieces, as Engine takes them: until one says that it is the last."""
    stop_text = StopText(Stream(texts, rest, names), stops)
    pieces = []
    for number in range(len(texts)):
        end = "max_tokens" if number == len(texts) - 1 else ""
        pieces.append(stop_text.piece(Token(number, 0.0, end, 0.0)))
        if pieces[-1].end:
            break
    return pieces


@given(st.lists(TEXTS, min_size=1, max_size=12), STOPS, st.sampled_from(["", "\ufffd"]))
@settings(max_examples=300, deadline=None)
def test_the_pieces_are_the_text_before_the_first_stop(texts, stops, rest):
    pieces = pieces_of(texts, stops, rest)
    text = "".join(piece.text for piece in pieces)
    assert [piece.id for piece in pieces] == list(range(len(pieces)))
    assert all(piece.end == "" for piece in pieces[:-1])
    # What had come when the answer ended, and before its last token.
    seen = "".join(texts[: len(pieces)]) + (rest if len(pieces) == len(texts) else "")
    before = "".join(texts[: len(pieces) - 1])
    assert not any(stop in before for stop in stops)
    found = [seen.find(stop) for stop in stops if stop in seen]
    if found:
        assert (text, pieces[-1].end) == (seen[: min(found)], "stop")
    else:
        assert (text, pieces[-1].end) == ("".join(texts) + rest, "max_tokens")


def test_text_is_held_back_only_while_it_may_be_a_stop():
    texts = ["one ", "<", "b", "<|en", "d|>", "two"]
    pieces = pieces_of(texts, ["<|end|>"], "")
    assert [piece.text for piece in pieces] == ["one ", "", "<b", "", ""]
    assert pieces[-1].end == "stop"


NAMED = st.lists(st.sampled_from(["<a>", "<b>", "a", "b", "ab", "<", ">a"]), min_size=1, max_size=9)
CROSSING = st.lists(st.text("ab<>", min_size=1, max_size=5), max_size=3)


@given(NAMED, CROSSING)
@settings(max_examples=300, deadline=None)
def test_stops_are_compared_with_names_of_control_tokens(texts, stops):
    names = ("<a>", "<b>")
    pieces = pieces_of(texts, stops, "", names)
    assert [piece.special for piece in pieces] == [
        text if text in names else "" for text in texts[: len(pieces)]
    ]
    seen = "".join(texts[: len(pieces)])
    found = [seen.find(stop) for stop in stops if stop in seen]
    assert pieces[-1].end == ("stop" if found else "max_tokens")
    assert not any(stop in "".join(texts[: len(pieces) - 1]) for stop in stops)
    # The text is what stands before the stop string, without the names.
    wanted, at, cut = "", 0, min(found, default=len(seen))
    for text in texts[: len(pieces)]:
        wanted += "" if text in names else text[: max(cut - at, 0)]
        at += len(text)
    assert "".join(piece.text for piece in pieces) == wanted
