"""The stream of events itself: comments while nothing comes, and its end if the client leaves."""

import asyncio

import pytest

from kccl.engine.serving.http import events
from kccl.engine.serving.http.events import DONE, EventStream, event, written

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


def run(made, leaves, *, is_read=True):
    """Sends a stream; returns the messages. The client leaves when `leaves` is set. If it reads
    nothing, the first message waits.
    """
    sent, ends = [], []

    async def send(message):
        sent.append(message)
        await asyncio.sleep(0 if is_read else 3600)

    async def receive():
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def answer():
        await EventStream(made(leaves), lambda: ends.append(True))(SCOPE, receive, send)

    asyncio.run(asyncio.wait_for(answer(), 60))
    assert ends == [True]
    return sent


def test_events_come_as_they_are_made():
    async def made(_):
        yield event({"a": "ä\n"})
        yield event({"b": 1}, "kind")
        yield DONE

    head, *bodies = run(made, asyncio.Event())
    assert dict(head["headers"])[b"cache-control"] == b"no-store"
    assert dict(head["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert [each["body"] for each in bodies] == [
        'data: {"a":"ä\\n"}\n\n'.encode(),
        b'event: kind\ndata: {"b":1}\n\n',
        b"data: [DONE]\n\n",
        b"",
    ]
    assert [each["more_body"] for each in bodies] == [True, True, True, False]


def test_comments_come_while_no_event_does(monkeypatch):
    monkeypatch.setattr(events, "_PING_S", 0.01)

    async def made(_):
        yield event({"a": 1})
        await asyncio.sleep(0.2)
        yield event({"a": 2})

    bodies = [each.get("body") for each in run(made, asyncio.Event())][1:]
    comments = [each for each in bodies if each == b": wait\n\n"]
    assert comments
    wanted = [event({"a": 1}), event({"a": 2}), b""]
    assert [each for each in bodies if each not in comments] == wanted


@pytest.mark.parametrize("waits", [True, False], ids=["while it waits", "while it sends"])
def test_a_client_that_leaves_closes_the_events(waits):
    closed = []

    async def made(leaves):
        try:
            yield event({"a": 1})
            leaves.set()
            while True:
                if waits:
                    await asyncio.sleep(3600)
                yield event({"a": 2})
        finally:
            closed.append(True)

    sent = run(made, asyncio.Event())
    assert closed == [True]
    assert all(each.get("more_body", True) for each in sent)


def test_a_client_that_leaves_before_it_reads_ends_the_answer():
    async def made(_):
        yield event({"a": 1})

    leaves = asyncio.Event()
    leaves.set()
    assert len(run(made, leaves, is_read=False)) == 1


def test_infinity_is_no_json():
    with pytest.raises(ValueError, match="JSON"):
        written({"a": float("inf")})
