"""The HTTP surface, in this process: who may ask, and what is bounded."""

import asyncio
import json
import re
import threading
import time

import httpx
import pytest
from asking import BASE, ask, get

import kccl
from kccl.engine import Engine
from kccl.engine.base.owner import Owner
from kccl.engine.model.drafts import OFF, Drafts
from kccl.engine.serve import _origin
from kccl.engine.serving.http import answers
from kccl.engine.serving.http.app import FILES, application
from kccl.engine.serving.http.service import Service, Settings
from kccl.engine.serving.submission import CANCELLED, End, Submission


@pytest.fixture(scope="module")
def engine(chat_model):
    with Engine(chat_model, blocks=1, context=128, prefixes=2) as engine:
        yield engine


@pytest.mark.parametrize(
    ("headers", "options", "status"),
    [
        ({}, {}, 200),
        ({"Host": "localhost:1"}, {}, 200),
        ({"Host": "[::1]:8000"}, {}, 200),
        ({"Host": "192.168.1.7"}, {}, 200),
        ({"Host": "evil.example"}, {}, 403),
        ({"Host": "127.0.0.1.evil.example"}, {}, 403),
        ({"Host": "[::1"}, {}, 403),
        ({"Host": "box.lan:80"}, {"hosts": ["box.lan"]}, 200),
        ({"Origin": BASE}, {}, 200),
        ({"Origin": "http://127.0.0.1:9999"}, {}, 403),
        ({"Origin": "null"}, {}, 403),
        ({"Origin": "http://["}, {}, 403),
        ({"Origin": "https://evil.example"}, {}, 403),
        ({"Origin": "https://ok.example"}, {"origins": ["https://ok.example"]}, 200),
        ({f"x-{number}": "1" for number in range(101)}, {}, 431),
    ],
)
def test_who_may_ask(engine, headers, options, status):
    for path in ("/v1/models", "/"):
        found = ask(engine, "GET", path, headers=headers, given=options)
        assert found.status_code == status
        assert status == 200 or found.json()["error"]["message"]


def test_a_browser_asks_for_leave_without_a_key(engine):
    headers = {"Origin": "https://ok.example", "Access-Control-Request-Method": "POST"}
    options = {"origins": ["https://ok.example"], "keys": ["k"]}
    found = ask(engine, "OPTIONS", "/v1/chat/completions", headers=headers, given=options)
    assert found.headers["access-control-allow-origin"] == "https://ok.example"
    # OpenAI's client of browsers has headers of its own, and reads when to try again.
    own = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    found = ask(engine, "OPTIONS", "/v1/chat/completions", headers=headers | own, given=options)
    assert found.status_code == 200
    assert "x-stainless-os" in found.headers["access-control-allow-headers"]
    asked = {"Origin": "https://ok.example", "Authorization": "Bearer k"}
    found = ask(engine, "GET", "/v1/models", headers=asked, given=options)
    assert found.headers["access-control-expose-headers"] == "Retry-After"
    assert ask(engine, "GET", "/v1/models", given=options).status_code == 401
    key = {"Authorization": "Bearer k"}
    assert ask(engine, "GET", "/v1/models", given=options, headers=key).status_code == 200
    # The page asks for the key itself.
    for path in ("/health", *FILES):
        assert ask(engine, "GET", path, given=options).status_code == 200


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"x" * 70000, 413, "more than 65536 bytes, must have at most 65536"),
        (b"", 400, "the body is no JSON"),
        (b"[1]", 400, "the body is of type list, must be an object"),
        (b"[" * 60000, 400, "the body is no JSON"),
        (b'{"prompt": "\\ud800"}', 400, "not valid UTF-8"),
        (b'{"prompt": []}', 400, "prompt"),
        (b'{"prompt": [9999]}', 400, "the prompt has id 9999, must be from 0 to 299"),
        (
            b'{"prompt": "a", "suffix": "b"}',
            400,
            "suffix is 'b', must be empty: the vocabulary lacks",
        ),
        (b'{"prompt": [5], "suffix": "b"}', 400, "must be empty if prompt has ids"),
        (b'{"prompt": "a", "suffix": "b", "echo": true}', 400, "must be empty if echo is true"),
        (b'{"prompt": "a", "suffix": "\\ud800"}', 400, "suffix: the text is not valid UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature is nan: input should be a fin"),
        (b'{"prompt": "a", "max_tokens": 1e400}', 400, "max_tokens is inf"),
        (b'{"prompt": "a", "logit_bias": {"0000000000001234567": 1}}', 400, "must be ids from 0"),
        (b'{"prompt": "a", "logit_bias": {"%s": 1}}' % (b"0" * 5000), 400, "must be ids from 0"),
    ],
)
def test_wrong_bodies(engine, content, status, message):
    found = ask(engine, "POST", "/v1/completions", content=content)
    assert (found.status_code, message in found.json()["error"]["message"]) == (status, True)


def test_paths_and_methods_that_do_not_exist(engine):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "/vendor/%2e%2e/app.js", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ):
        found = ask(engine, method, path)
        assert (found.status_code, found.json()["error"]["code"]) == (status, None)


def test_the_page_runs_only_what_comes_from_here(engine):
    page = ask(engine, "GET", "/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text
    for path, (_, kind) in FILES.items():
        assert ask(engine, "GET", path).headers["content-type"] == kind


def test_the_page_asks_one_other_server_where_that_is_named(engine):
    other = _origin("http://127.0.0.1:8001/")
    for compare, sources in ((other, f"'self' {other}"), ("", "'self'")):
        app = application(engine, Settings(names=("tiny",), compare=compare))
        page, info = (get(app, path) for path in ("/", "/kccl/info"))
        assert f"connect-src {sources};" in page.headers["content-security-policy"]
        assert (info.json()["compare"], info.json()["slots"]) == (compare or None, engine.slots)
    for wrong in ("127.0.0.1:8001", "http://a/b", "http://a; script-src *", "http://a b", "ws://a"):
        with pytest.raises(kccl.InvalidArgument, match="must be as in http://"):
            _origin(wrong)


def test_the_special_tokens_are_named(engine):
    """As lm-eval reads them: each is an id when it is encoded."""
    told = ask(engine, "GET", "/tokenizer_info").json()
    eos = engine.tokenizer.eos_ids[0]
    body = {"prompt": told["eos_token"], "add_special_tokens": False}
    assert ask(engine, "POST", "/tokenize", json=body).json()["tokens"] == [eos]
    assert told.keys() == {"bos_token", "eos_token", "pad_token", "max_model_len"}


def test_an_echo_ends_when_its_client_leaves(engine, monkeypatch):
    """While the prompt waits to be scored."""
    monkeypatch.setattr(answers, "_LOOK_S", 0.01)
    app = application(engine, Settings(names=("tiny",)))
    body = json.dumps({"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}).encode()
    started, sent = [], []
    cancelled = threading.Event()

    def submit(job):
        def cancel(submission):
            submission.finish(End(CANCELLED))
            cancelled.set()

        started.append(Submission(job, cancel, Owner()))
        return started[-1]

    monkeypatch.setitem(vars(engine.sessions), "submit", submit)

    async def run():
        given = iter([{"type": "http.request", "body": body}])

        async def receive():
            return next(given, {"type": "http.disconnect"})

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        await app(scope | {"headers": [(b"host", b"localhost")]}, receive, send)
        assert await asyncio.to_thread(cancelled.wait, 30)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert (sent[0]["status"], len(started)) == (499, 1)
    assert ended(app) == {"left": 1}


def ended(app):
    """How answers ended, by /metrics."""

    text = get(app, "/metrics").text
    found = re.findall(r'^kccl_answers_total{end="(\w+)"} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "v1/chat/completions",
            {"chat_template_kwargs": {"\ud800": 1}},
            "chat_template_kwargs",
            r"\ud800 is no variable of the chat template",
        ),
        ("v1/chat/completions", {"content": "a" * 400}, "messages", "tokens, "),
        ("v1/chat/completions", {"content": "a" * 60000}, "messages", "has 60000 characters"),
        ("v1/completions", {"prompt": "a" * 400}, "prompt", "too many: it must have at most 127"),
        ("v1/completions", {"prompt": "a" * 60000}, "prompt", "has 60000 characters, must have at"),
        ("tokenize", {"prompt": "a" * 60000}, "prompt", "has 60000 characters, must have at most"),
        (
            "v1/completions",
            {"prompt": ["a"] * 66},
            "prompt",
            "asks for 66 answers, must ask for at",
        ),
        ("detokenize", {"tokens": [1, 300]}, "tokens", "tokens is 300, must be ids from 0 to 299"),
    ],
)
def test_errors_name_their_field(engine, path, body, param, message):
    if "content" in body or "chat" in path:
        body = {"messages": [{"role": "user", "content": body.pop("content", "a")}]} | body
    found = ask(engine, "POST", f"/{path}", content=json.dumps(body).encode())
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_an_answer_has_its_own_name_and_time_and_counts_its_prompt_once(engine, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 7e9)
    body = {"prompt": [9, 9, 9, 9, 9, 9], "max_tokens": 2, "n": 2, "model": "other"}
    found = ask(engine, "POST", "/v1/completions", json=body, names=("tiny", "other"))
    told = found.json()
    assert (told["model"], told["created"]) == ("other", 7000000000)
    # The second choice finds what the first one left: that was not there before.
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_usage_and_metrics_count_drafts(engine):
    prompt = [9, 8, 7]
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 1, "n": 2}
    answer = engine.generate(prompt, max_tokens=40, temperature=0).ids
    right = Drafts(3, drafter=lambda ids, most: answer[len(ids) - 3 :][:most])
    found = []
    app = application(engine, Settings(names=("tiny",)))
    for drafts in (OFF, right, Drafts(3, drafter=lambda ids, most: [answer[0]])):
        engine._runner.drafts = drafts
        found.append(get(app, "/v1/completions", method="POST", json=body).json())
    engine._runner.drafts = OFF
    of_none, of_right, of_wrong = (
        (each["accepted_prediction_tokens"], each["rejected_prediction_tokens"])
        for each in (one["usage"]["completion_tokens_details"] for one in found)
    )
    assert of_none == (0, 0)
    # Behind the first token nine passes give four tokens, and the last one three.
    assert of_right == (2 * 29, 0)
    assert of_wrong[1] > of_wrong[0]
    text = get(app, "/metrics").text
    proposed, accepted = (
        float(re.search(rf"^kccl_{name}_total (\S+)$", text, re.MULTILINE)[1])
        for name in ("draft_tokens", "accepted_draft_tokens")
    )
    assert (proposed, accepted) == (sum(of_right + of_wrong), of_right[0] + of_wrong[0])
    assert found[0]["choices"] == found[1]["choices"] == found[2]["choices"]


def test_other_requests_go_on_while_a_text_is_encoded(engine, monkeypatch):
    began, goes = threading.Event(), threading.Event()

    def encode(text, add_bos=True):
        began.set()
        assert goes.wait(60)
        return [5]

    monkeypatch.setitem(vars(engine.tokenizer), "encode", encode)

    async def run():
        transport = httpx.ASGITransport(app=application(engine, Settings(names=("tiny",))))
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            slow = asyncio.create_task(client.post("/tokenize", json={"prompt": "a"}))
            assert await asyncio.to_thread(began.wait, 60)
            assert (await client.get("/health")).status_code == 200
            assert not slow.done()
            goes.set()
            assert (await slow).json()["tokens"] == [5]

    asyncio.run(asyncio.wait_for(run(), 100))


def test_requests_that_are_refused_are_counted(engine):
    app = application(engine, Settings(names=("tiny",)), keys=["k"])

    async def read():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            key = {"Authorization": "Bearer k"}
            await client.get("/health", headers={"Origin": "http://evil.example"})
            await client.get("/v1/models")
            await client.get("/v1/models/gpt", headers=key)
            await client.get("/v1/completions", headers=key)
            for number in range(2):
                await client.get(f"/nothing{number}", headers=key)
            return (await client.get("/metrics", headers=key)).text

    text = asyncio.run(read())
    found = re.findall(r'^kccl_requests_total{path="(.+)",status="(.+)"} (.+)$', text, re.MULTILINE)
    assert found == [
        ("/health", "403", "1.0"),
        ("/v1/models", "401", "1.0"),
        ("/v1/models/{name:path}", "404", "1.0"),
        ("/v1/completions", "405", "1.0"),
        ("other", "404", "2.0"),
    ]


def test_an_answer_that_is_there_already_holds_nobody_up(engine):
    service = Service(engine, Settings(names=("tiny",)))
    submission = Submission(None, lambda _: None, Owner())
    for number in range(100):
        submission.put(number)
    submission.finish(End("stop"))

    async def run():
        turns, found = 0, []

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        async for each in service.items(submission):
            found.append((each, turns))
        beside.cancel()
        return found

    found = asyncio.run(run())
    assert [each for each, _ in found] == list(range(100))
    assert found[-1][1] - found[0][1] >= 90
