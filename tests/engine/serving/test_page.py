"""The page in a browser: Debian's Chromium, which playwright drives."""

import json
import re
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_openai import start

from kccl.engine.serve import _listen

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium")
OUT = Path(__file__).parents[3] / "out"


# The ids that end an answer of the models here.
UNENDING = "1: -100, 2: -100"
IN_STORE = "JSON.parse(localStorage.getItem('kccl') ?? '{}')"


@contextmanager
def serving(model, *options):
    server, url = start(model, "--blocks", "1", "--served-model-name", "tiny", *options)
    try:
        yield server, url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
        server.stderr.close()


@pytest.fixture(scope="module")
def server(slow_model):
    with serving(slow_model) as (_, url):
        yield url


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        # Without its own sandbox it runs as root too, as in a container.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, url, **options):
    """A tab of a browser without history. What its scripts raise fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    page, failures = context.new_page(), []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#engine[data-state=there]:has-text('tiny')")
    yield page
    context.close()
    assert failures == []


@pytest.fixture
def page(browser, server):
    with opened(browser, server, color_scheme="dark") as page:
        yield page


def send(page, text, tokens=60, bias=""):
    page.fill("[name=max_tokens]", str(tokens))
    page.fill("[name=logit_bias]", bias)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_end(page):
    page.wait_for_selector("#send:visible", timeout=60000)


def wait_for_tokens(page):
    """The page's policy refuses wait_for_function(), which is a string of JavaScript."""
    end = time.monotonic() + 60
    while not (text := page.inner_text("#count")).isdecimal() or int(text) <= 3:
        assert time.monotonic() < end
        page.wait_for_timeout(10)


def kept(page):
    """The conversations that the browser keeps."""
    return page.evaluate(IN_STORE).get("chats", [])


def shoot(page, name):
    OUT.mkdir(exist_ok=True)
    page.screenshot(path=OUT / f"page_{name}.png")


def test_a_message_is_answered_with_the_time_of_each_token(page):
    send(page, "<b>Hi</b>", bias=UNENDING)
    wait_for_end(page)
    assert page.inner_text("#messages .user") == "<b>Hi</b>"
    assert page.locator("#messages .assistant").count() == 1
    assert re.fullmatch(r"[\d,]+(\.\d+)?", page.inner_text("#rate"))
    assert re.fullmatch(r"\d+ of \d+", page.inner_text("#cached"))
    assert page.inner_text("#count") == "60"
    drawn = "[...$('plot').getContext('2d').getImageData(0, 0, 200, 130).data].some(Boolean)"
    assert page.evaluate(drawn.replace("$('plot')", "document.getElementById('plot')"))
    page.hover("#plot")
    assert re.match(r"token \d+: \d+(\.\d+)? [mµ]?s  \"", page.inner_text("#tip"))
    shoot(page, "dark")
    page.click("#theme")
    shoot(page, "light")


def test_on_a_telephone_nothing_is_wider_than_it(browser, server):
    with opened(browser, server, has_touch=True) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        page.fill("#prompt", "Hi")
        page.press("#prompt", "Enter")
        wait_for_end(page)
        assert re.search(r"tokens/s . first .* . median", page.inner_text("#strip"))
        shoot(page, "telephone")
        for button, shown in (("#open-panel", "#settings"), ("#open-history", "#chats")):
            page.tap(button)
            assert page.is_visible(shown)
            shoot(page, f"telephone_{shown[1:]}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.tap("#open-history")
        assert page.is_visible("#prompt") and not page.is_visible("#chats")


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_is_stopped_and_kept_by_the_browser(page, how):
    send(page, "Go on", 1900, UNENDING)
    wait_for_tokens(page)
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    wait_for_end(page)
    assert page.inner_text("#status") == "stopped"
    page.fill("[name=top_k]", "7")
    page.fill("[name=key]", "secret")
    page.press("[name=key]", "Tab")
    page.reload()
    page.wait_for_selector("#engine[data-state=there]")
    assert page.inner_text("#messages .user") == "Go on"
    assert page.locator("#messages .assistant").count() == 1
    assert page.input_value("[name=top_k]") == "7"
    assert "secret" not in json.dumps(page.evaluate(IN_STORE))


def test_all_fields_reach_the_server(page):
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3}
    given |= {"repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2}
    for name, value in given.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("[name=stop]", "one\ntwo ")
    page.fill("[name=system]", "Be brief.")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "Hi", 4, "5: -100, 7: 2.5")
    wait_for_end(page)
    body = asked.value.post_data_json
    assert {name: body[name] for name in given} == given
    assert (body["stop"], body["model"]) == (["one", "two "], "tiny")
    assert (body["logit_bias"], body["max_tokens"]) == ({"5": -100, "7": 2.5}, 4)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert page.get_attribute("#status", "class") == ""
    send(page, "Hi", 4, "nonsense")
    page.wait_for_selector("#status.wrong:has-text('must be as in 42: -100')")
    assert page.input_value("#prompt") == "Hi"


def test_conversations_are_kept_and_forgotten(page):
    send(page, "First", 4)
    wait_for_end(page)
    page.keyboard.press("Alt+n")
    assert page.locator("#messages li").count() == 0
    send(page, "Go on", 1900, UNENDING)
    wait_for_tokens(page)
    # The answer that runs ends, and is kept where it belongs.
    page.click("#chats .open:has-text('First')")
    wait_for_end(page)
    assert page.locator("#messages .user").all_inner_texts() == ["First"]
    assert [each["messages"][0]["content"] for each in kept(page)] == ["Go on", "First"]
    assert [len(each["messages"]) for each in kept(page)] == [2, 2]
    page.hover("#chats li:has-text('First')")
    page.click("#chats li:has-text('First') .drop")
    assert page.locator("#messages li").count() == 0
    assert [each["messages"][0]["content"] for each in kept(page)] == ["Go on"]


# Three conversations, and then no room for anything.
FILL = """() => {
    const chat = (id) => ({ id, messages: [{ role: "user", content: id + "x".repeat(1000) }] });
    const { settings } = JSON.parse(localStorage.kccl), chats = ["new", "middle", "old"].map(chat);
    localStorage.kccl = JSON.stringify({ settings, chats });
    for (let size = 1 << 23; size; size >>= 1) {
        try { localStorage[size] = "x".repeat(size); } catch { }
    }
}"""


@pytest.mark.parametrize(("size", "left"), [(1500, "Hi new"), (9000, "new middle old")])
def test_a_message_is_answered_where_the_storage_is_full(page, size, left):
    """The oldest conversations give way, and none does for one that has no room at all."""
    answering(page, {"content": "*c*"})
    page.fill("[name=max_tokens]", "60")
    page.press("[name=max_tokens]", "Tab")
    page.evaluate(FILL)
    send(page, "Hi" + "x" * size)
    page.wait_for_selector("#messages em")
    wait_for_end(page)
    assert [each["messages"][0]["content"].rstrip("x") for each in kept(page)] == left.split()
    assert ("storage is full" in page.inner_text("#status")) == ("Hi" not in left)


def test_the_current_conversation_can_be_chosen_while_it_is_answered(page):
    send(page, "Go on", 1900, UNENDING)
    wait_for_tokens(page)
    page.click("#chats .open:has-text('Go on')")
    page.click("#stop")
    wait_for_end(page)
    assert page.locator("#messages .assistant").count() == 1
    send(page, "And now", 4, UNENDING)
    wait_for_end(page)
    assert [len(each["messages"]) for each in kept(page)] == [4]


def test_alternatives_are_shown(page):
    page.check("[name=alternatives]")
    send(page, "Hi", 5, UNENDING)
    wait_for_end(page)
    page.hover("#messages .raw .token >> nth=0")
    told = page.inner_text("#tip")
    assert re.match(r"first token\s+\"", told)
    assert len(re.findall(r"\d+\.\d %", told)) == 8
    shoot(page, "alternatives")
    page.focus("#messages .raw")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert re.match(r"\d+(\.\d+)? [mµ]?s\s+\"", page.inner_text("#tip"))


def answering(page, *deltas):
    """Lets the page have these deltas as the answers to its messages."""
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    told = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=told),
    )


def test_an_answers_html_is_text(page):
    """And images of others are not asked for."""
    answering(page, {"content": "<img src=x onerror=alert(1)> ![a](b.png) **c**"})
    send(page, "Hi")
    page.wait_for_selector("#messages strong")
    assert page.locator("#messages img").count() == 0


def test_reasoning_stands_apart(page):
    answering(page, {"role": "assistant"}, {"reasoning_content": "a <b>"}, {"content": "*c*"})
    send(page, "Hi")
    page.wait_for_selector("#messages em")
    assert page.text_content("#messages .reasoning p") == "a <b>"
    assert not page.is_visible("#messages .reasoning p")
    assert kept(page)[0]["messages"][1]["content"] == "*c*"


# Gives the page an answer whose events a test sends with feed().
FEED = """() => {
    const ask = window.fetch, kccl = { token_s: 0.001, bound_share: null };
    const start = (stream) => window.feed = (delta, content) => {
        const event = { choices: [{ delta, logprobs: { content } }], kccl };
        stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\n\n`));
    };
    window.fetch = async (url, options) => url.endsWith("completions")
        ? new Response(new ReadableStream({ start })) : ask(url, options);
}"""
TOKEN = {"token": "t", "logprob": -1, "top_logprobs": []}


@pytest.mark.parametrize("tokens", [[], [TOKEN]], ids=["plain", "alternatives"])
def test_reasoning_is_one_box_that_stays_as_the_reader_left_it(page, tokens):
    """The parts of the answer come one at a time, so that each is drawn by itself."""
    page.evaluate(FEED)
    send(page, "Hi")
    page.wait_for_selector("#messages .running")
    text, body = "#messages .reasoning p", "#messages .assistant"

    def feed(delta, place, said):
        page.evaluate("([delta, tokens]) => feed(delta, tokens)", [delta, tokens])
        page.wait_for_selector(f"{place}:has-text('{said}')", state="attached")
        assert page.locator(text).count() == 1
        return page.is_visible(text)

    assert feed({"reasoning_content": "one"}, text, "one")
    page.click("#messages summary")
    assert not feed({"reasoning_content": " two"}, text, "one two")
    page.click("#messages summary")
    assert feed({"reasoning_content": " three"}, text, "one two three")
    assert not feed({"content": "four"}, body, "four")
    page.click("#messages summary")
    assert feed({"content": " five"}, body, "four five")
    assert page.text_content(body).strip() == "Reasoningone two threefour five"


def test_keys_are_told(page):
    page.click("h1")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.click("h1")
    page.keyboard.press("?")
    assert page.is_visible("#keys kbd >> nth=0")
    page.keyboard.press("Escape")
    assert not page.is_visible("#keys")


def test_a_request_that_fails_can_be_sent_again(page):
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "Hi")
    page.wait_for_selector("#status.wrong")
    # Its text can be sent again, and nothing of it is kept.
    wait_for_end(page)
    assert page.input_value("#prompt") == "Hi"
    assert kept(page) == []
    page.unroute("**/v1/chat/completions")
    send(page, "Hi again", 4)
    page.wait_for_selector("#messages .assistant")
    wait_for_end(page)
    assert page.locator("#messages .user").all_inner_texts() == ["Hi again"]
    assert page.get_attribute("#status", "class") == ""


def test_a_server_that_goes_and_comes_back(browser, slow_model):
    """It goes in the midst of an answer, and the page finds the next one by itself."""
    with serving(slow_model) as (server, url), opened(browser, url) as page:
        send(page, "Go on", 1900, UNENDING)
        wait_for_tokens(page)
        server.kill()
        wait_for_end(page)
        assert page.get_attribute("#status", "class") == "wrong"
        page.wait_for_selector("#engine[data-state=away]", timeout=60000)
        shoot(page, "away")
        # What had come is kept.
        assert [each["role"] for each in kept(page)[0]["messages"]] == ["user", "assistant"]
        with serving(slow_model, "--port", url.rpartition(":")[2]):
            page.wait_for_selector("#engine[data-state=there]", timeout=60000)
            assert page.inner_text("#status") == ""
            send(page, "Again", 4)
            page.wait_for_selector("#messages .assistant >> nth=1")
            wait_for_end(page)


def test_two_tabs_take_turns_and_keep_each_others_chats(browser, server):
    context = browser.new_context()
    tabs = [context.new_page() for _ in range(2)]
    for tab in tabs:
        tab.goto(server)
        tab.wait_for_selector("#engine[data-state=there]")
    for number, tab in enumerate(tabs):
        send(tab, f"Hi {number}", 100, UNENDING)
    for tab in tabs:
        wait_for_end(tab)
        assert tab.locator("#messages .assistant").count() == 1
    assert {each["messages"][0]["content"] for each in kept(tabs[0])} == {"Hi 0", "Hi 1"}
    tabs[0].reload()
    assert tabs[0].locator("#messages .user").all_inner_texts() == ["Hi 0"]
    context.close()


def test_two_servers_are_compared(browser, slow_model):
    with _listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    origin = f"http://127.0.0.1:{port}"
    with (
        serving(slow_model, "--allow-origin", origin) as (_, other),
        serving(slow_model, "-n", "2", "--compare", other, "--port", str(port)) as (_, url),
        opened(browser, url) as page,
    ):
        page.fill("[name=temperature]", "1")
        page.click("#compare")
        send(page, "Hi", 40, UNENDING)
        wait_for_end(page)
        heads = page.locator("#messages .pair h2").all_inner_texts()
        assert heads == ["1 rank on host · tiny", "2 ranks on host · tiny"]
        verdict = page.inner_text("#messages .verdict")
        assert re.match(r"[12] ranks? on host: [\d.]+ times as fast as [12] rank", verdict)
        assert "Both have the same text. They were asked one after the other." in verdict
        # The conversation has this server's answer.
        assert [each["role"] for each in kept(page)[0]["messages"]] == ["user", "assistant"]
        shoot(page, "comparison")
