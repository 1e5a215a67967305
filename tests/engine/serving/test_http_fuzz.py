"""Whatever a request has, the server answers, and says what is wrong."""

import asyncio
import json

import pytest
from asking import ask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kccl.engine import Engine
from kccl.engine.serving.http.app import FILES, application
from kccl.engine.serving.http.service import Settings


@pytest.fixture(scope="module")
def engine(chat_model):
    with Engine(chat_model, blocks=1, context=128, prefixes=2) as engine:
        yield engine


KEYS = ["role", "content", "type", "text", "7", "json_schema", "schema", "json", "regex"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 40)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "</s>", "\ud800", "text", "", "json_schema", "object"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)
NAMES = ["stream", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"]
NAMES += ["min_p", "seed", "stop", "logprobs", "top_logprobs", "logit_bias", "echo", "suffix"]
NAMES += ["presence_penalty", "repetition_penalty", "stream_options", "tools", "model", "kccl"]
NAMES += ["chat_template_kwargs", "response_format", "tokens", "add_special_tokens"]
NAMES += ["guided_json", "guided_regex", "guided_choice", "grammar", "structured_outputs"]
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": VALUES}),
    max_size=3,
)
NAMES += ["tool_choice", "parallel_tool_calls", "input", "instructions", "text", "truncation"]
NAMES += ["max_output_tokens", "metadata"]
POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]


# Each run has other examples.
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(POSTS),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    MESSAGES | VALUES,
    VALUES | st.just("ab") | st.lists(st.integers(0, 299), min_size=1, max_size=3),
    st.booleans(),
)
def test_no_body_makes_the_server_fail(engine, path, fields, messages, prompt, both):
    body = {"max_tokens": 2, "max_output_tokens": 2, "input": messages} | fields
    if both or "chat" in path:
        body["messages"] = messages
    if both or "chat" not in path:
        body["prompt"] = prompt
    found = ask(engine, "POST", path, content=json.dumps(body).encode())
    assert found.status_code in (200, 400, 404), found.text
    if found.status_code != 200:
        assert found.json()["error"]["message"]
    else:
        assert "NaN" not in found.text and "Infinity" not in found.text


HEADERS = ["content-type", "content-length", "accept", "range", "if-none-match", "authorization"]
HEADERS += ["transfer-encoding", "origin", "host", "x-forwarded-for", "cookie", "if-range", "te"]
PATHS = [*POSTS, *FILES, "/v1/models", "/health", "/metrics", "/kccl/info", "/tokenizer_info"]
BYTES = st.binary(max_size=20) | st.sampled_from([b"bytes=0-1,5-", b"bytes=-1", b"9" * 5000, b"*"])


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "x"]),
    st.sampled_from(PATHS) | st.text(max_size=8).map("/{}".format),
    st.lists(st.tuples(st.sampled_from(HEADERS), BYTES), max_size=4),
    st.binary(max_size=40),
    # h11 lets no other bytes through.
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20),
    st.sampled_from([(), ("k",)]),
)
def test_no_request_makes_the_server_fail(engine, method, path, headers, content, query, keys):
    app = application(engine, Settings(names=("tiny",)), keys=keys)
    raw = [(name.encode(), value) for name, value in headers]
    sent, given = [], iter([{"type": "http.request", "body": content}])

    async def receive():
        return next(given, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    scope |= {"headers": [(b"host", b"localhost"), *raw], "root_path": "", "extensions": {}}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    assert 200 <= sent[0]["status"] < 500 and not sent[-1].get("more_body")
