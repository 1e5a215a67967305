"""The server as OpenAI's own client meets it: a process, on a port that is free."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest

TALK = [{"role": "user", "content": "Hi"}]
LONG = 1500


def start(model, *options):
    command = [sys.executable, "-m", "kccl", "serve", "--model", str(model), "--port", "0"]
    server = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            return server, found[1]
    server.wait()
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def served(chat_model, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first\nsecond\n")
    options = ["--api-key-file", str(keys), "--served-model-name", "tiny", "--queue", "20"]
    server, url = start(chat_model, *options, "--blocks", "1")
    yield url
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0
    server.stderr.close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served}/v1", api_key="second", max_retries=0) as client:
        yield client


def health(client):
    return client.get("/../health", cast_to=object)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model is 'gpt', must be 'tiny'"):
        client.models.retrieve("gpt")


def test_a_chat_as_a_whole_and_as_a_stream(client):
    given = {"model": "tiny", "messages": TALK, "max_completion_tokens": 12, "seed": 3}
    given |= {"temperature": 1.0, "logprobs": True, "top_logprobs": 20}
    whole = client.chat.completions.create(**given)
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert (whole.usage.completion_tokens, whole.object) == (12, "chat.completion")
    content = choice.logprobs.content
    assert len(content) == 12 and all(len(each.top_logprobs) == 20 for each in content)
    spelt = b"".join(bytes(each.bytes) for each in content)
    assert spelt.decode(errors="replace") == choice.message.content

    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options=options))
    *deltas, last = chunks
    assert len({(each.id, each.created, each.model) for each in chunks}) == 1
    assert deltas[0].choices[0].delta.role == "assistant"
    text = "".join(each.choices[0].delta.content for each in deltas)
    assert text == choice.message.content
    assert [each.choices[0].finish_reason for each in deltas] == [None] * 12 + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    # The whole prompt but its last token was there already.
    assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1
    found = [each.choices[0].logprobs.content[0].logprob for each in deltas[1:]]
    assert found == [each.logprob for each in content]


def test_several_choices_have_seeds_of_their_own(client):
    given = {"model": "tiny", "messages": TALK, "max_tokens": 8, "temperature": 1.0, "seed": 1}
    whole = client.chat.completions.create(**given, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3 and [each.index for each in whole.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**given, n=3, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content
    assert streamed == texts


def test_what_clients_send_besides(client):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "Hi again", "name": "me"},
    ]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=3,
        user="me",
        top_p=0.9,
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        logit_bias={"40": 100},
        temperature=0,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "unknown": {"a": 1}},
    )
    # The bias wins, whatever the penalties.
    assert len(set(answer.choices[0].message.content)) == 1


def test_a_stop_string_ends_the_text_in_front_of_it(client):
    given = {"model": "tiny", "prompt": "Hello", "temperature": 0}
    text = client.completions.create(**given, max_tokens=30).choices[0].text
    stop = text[9:11]
    (choice,) = client.completions.create(**given, max_tokens=30, stop=[stop, "\0\0"]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    (choice,) = client.completions.create(**given).choices
    assert (choice.text, choice.finish_reason) == (choice.text, "length")


def test_completions_of_several_prompts(client):
    post = {"add_special_tokens": True, "prompt": "ab"}
    ids = client.post("/../tokenize", body=post, cast_to=object)["tokens"]
    text = client.post("/../detokenize", body={"tokens": ids}, cast_to=object)["prompt"]
    assert text == "ab"
    for prompt in (["ab", "c"], [ids, [5, 6]]):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, n=2)
        assert [each.index for each in found.choices] == [0, 1, 2, 3]
        assert found.usage.completion_tokens == 16
    one = client.completions.create(model="tiny", prompt=ids, max_tokens=4)
    both = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=4)
    assert one.choices[0].text == both.choices[0].text


def test_echo_as_lm_eval_reads_it(client):
    ids = [0, 70, 80, 90, 100, 70]
    given = {"model": "tiny", "prompt": [ids], "temperature": 0, "echo": True, "logprobs": 1}
    found = client.completions.create(**given, max_tokens=1).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(ids) + 1
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    # The generated token is the likeliest one: the same number.
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())
    pairs = zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
    assert all(logprob <= max(top.values()) for logprob, top in pairs)
    # A token's number does not depend on what is computed behind it.
    again = client.completions.create(**given | {"prompt": [ids[:4]]}, max_tokens=0)
    assert again.choices[0].logprobs.token_logprobs == found.token_logprobs[:4]
    assert client.completions.create(**given | {"logprobs": None}, max_tokens=1).choices[0].text


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "temperature is 3: input should be less than or equal"),
        ({"n": 0}, "n", "n is 0: input should be greater than or equal to 1"),
        ({"stop": ["a"] * 5}, "stop", "stop is .*at most 4 items"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs is 3, must be 0 if logprobs is not"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "u", "content": ""}]}, "messages[0].role", "is 'u': input should"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "logit_bias is '9999', must be ids from 0 to"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing, must be given"),
        ({"model": "gpt-4"}, "model", "model is 'gpt-4', must be 'tiny'"),
        (
            {"messages": [{"role": "user", "content": "a" * 3000}]},
            "messages",
            r"the prompt has \d+ tokens, \d+ too many: it must have at most 2047 in a context of",
        ),
    ],
)
def test_errors_name_the_field_and_the_values(client, given, param, message):
    body = {"model": "tiny", "messages": TALK} | given
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert (caught.value.body["param"], caught.value.status_code in (400, 404)) == (param, True)
    assert re.search(message, caught.value.body["message"])


def test_a_key_is_needed(client):
    assert client.with_options(api_key="first").models.list().data
    for key in ("third", "firs", "first second"):
        other = client.with_options(api_key=key)
        with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
            other.models.list()


def answered(client):
    """How many tokens of answers there were."""
    text = client.get("/../metrics", cast_to=str)
    return float(re.search(r"^kccl_answer_tokens_total (\S+)$", text, re.MULTILINE)[1])


def test_who_leaves_is_not_answered_on(client):
    given = {"model": "tiny", "messages": TALK, "max_tokens": LONG, "n": 16}
    # None of the ids that end an answer.
    given |= {"logit_bias": {"1": -100, "2": -100}}
    before, idle = answered(client), {"status": "ok", "waiting": 0, "running": 0}
    stream = client.chat.completions.create(**given, stream=True)
    next(stream)
    assert health(client)["waiting"] >= 10
    stream.close()
    until(lambda: health(client) == idle)
    # Also who waits for a whole answer.
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**given, timeout=0.3)
    until(lambda: health(client) == idle)
    assert answered(client) - before < 16 * LONG


def test_a_full_queue_says_when_to_come_again(client):
    given = {"model": "tiny", "messages": TALK, "max_tokens": LONG, "n": 16, "stream": True}
    # None of the ids that end an answer: the queue stays full.
    given |= {"logit_bias": {"1": -100, "2": -100}}
    streams = [client.chat.completions.create(**given)]
    with pytest.raises(openai.RateLimitError, match="requests wait, must be fewer than 20") as told:
        for _ in range(2):
            streams.append(client.chat.completions.create(**given))
    assert told.value.response.headers["retry-after"] == "1"
    for each in streams:
        each.close()
    until(lambda: health(client) == {"status": "ok", "waiting": 0, "running": 0})


def test_a_client_that_does_not_read_holds_nobody_up(served, client):
    address = served.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = {"messages": TALK, "max_tokens": 400, "stream": True, "logprobs": True}
        body |= {"top_logprobs": 20, "logit_bias": {"1": -100, "2": -100}}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {':'.join(address)}\r\n"
        head += f"Authorization: Bearer first\r\nContent-Length: {len(data)}\r\n\r\n"
        before = answered(client)
        slow.sendall(head.encode() + data)
        until(lambda: answered(client) > before)
        answer = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=2)
        assert answer.usage.completion_tokens == 2


def test_sigterm_ends_what_was_asked_before(chat_model):
    server, url = start(chat_model, "-n", "2", "--blocks", "1", "--context", "500")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=chat_model.name,
            prompt="a",
            max_tokens=100,
            stream=True,
            logit_bias={"1": -100, "2": -100},
        )
        next(stream)
        server.send_signal(signal.SIGTERM)
        assert len(list(stream)) == 99
    assert server.wait(timeout=60) == 0
    server.stderr.close()


@pytest.mark.long
def test_ranks_of_a_job(chat_model):
    """Rank 0 serves, the others follow, and SIGTERM ends all."""
    command = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, "-m", "kccl"]
    command += ["serve", "--model", str(chat_model), "--port", "0", "--blocks", "1"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    url = next(
        found[1]
        for line in server.stderr
        if (found := re.search(r"listening on (http://\S+)", line))
    )
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=chat_model.name, prompt="a", max_tokens=5)
        assert answer.usage.completion_tokens == 5
    server.send_signal(signal.SIGTERM)
    server.wait(timeout=60)
    server.stderr.close()
