"""The page in a browser, with several answers to a message."""

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
