"""The page in a browser, with several answers to a message."""

import json

import pytest
from test_page import UNENDING, browser, kept, page, send, server, wait_for_end

__all__ = ["browser", "page", "server"]

pytestmark = pytest.mark.long


def test_several_answers_come_at_once_and_one_is_kept(page):
    page.fill("[name=answers]", "3")
    page.fill("[name=temperature]", "0.9")
    send(page, "Hi", bias=UNENDING)
    page.wait_for_selector(".pair article.running >> nth=2")
    wait_for_end(page)
    texts = page.locator(".pair .text").all_inner_texts()
    assert len(texts) == 3 and len(set(texts)) > 1
    assert "180 tokens" in page.inner_text(".verdict")
    page.click(".pair .keep >> nth=1")
    assert page.locator(".pair .kept").count() == 1
    assert kept(page)[0]["messages"][1]["content"].split() == texts[1].split()
    page.fill("[name=answers]", "1")
    send(page, "More", bias=UNENDING)
    wait_for_end(page)
    held = kept(page)
    page.click(".pair .keep >> nth=2")
    assert kept(page) == held


def test_the_others_answer_where_the_first_one_fails(page):
    """The conversation goes on with the first answer that came, and another can be chosen."""

    def answer(route):
        seed = json.loads(route.request.post_data)["seed"]
        if seed == 1:
            route.abort()
            return
        choice = {"delta": {"content": f"answer {seed}"}, "finish_reason": None}
        event = {"choices": [choice], "kccl": {"token_s": 0.01, "bound_share": None}}
        told = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=told)

    page.route("**/v1/chat/completions", answer)
    page.fill("[name=answers]", "3")
    page.fill("[name=seed]", "1")
    send(page, "Hi")
    page.wait_for_selector("#status.wrong")
    wait_for_end(page)
    assert [text.strip() for text in page.locator(".pair .text").all_inner_texts()] == [
        *("", "answer 2", "answer 3")
    ]
    said = [message["content"] for message in kept(page)[0]["messages"]]
    assert said == ["Hi", "answer 2"] and page.locator("#messages .user").count() == 1
    assert page.inner_text(".pair .kept h2").lower() == "seed 2"
    page.click(".pair .keep >> nth=1")
    assert kept(page)[0]["messages"][1]["content"] == "answer 3"
