"""The page in a browser, with several answers to a message, or with drafts."""

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
    told = page.inner_text(".verdict")
    assert "180 tokens" in told and "The server answers 4 at a time." in told
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


def test_accepted_drafts_are_told(page):
    told = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    usage["completion_tokens_details"] = told
    event = json.dumps({"choices": [{"delta": {"content": "Hm"}}], "usage": usage})
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    send(page, "Hi")
    wait_for_end(page)
    assert (page.inner_text("#cached"), page.inner_text("#drafts")) == ("4 of 5", "3 of 5")
