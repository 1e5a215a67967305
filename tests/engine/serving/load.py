"""Many clients of one server, some of which leave.

python tests/engine/serving/load.py --requests 10000 --clients 64

Each request has one of a few prompts at temperature 0, so that its whole answer is known. A client
reads to the end, or leaves in the queue, in the prompt, or in the answer. Then nothing may be left
in the server, and each answer that was read must be whole. Requests begin in the order in which
they were sent.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from test_openai import start
from tiny_models import LLAMA, write_folder

UNENDING = {"1": -100, "2": -100}
TOKENS = 24
# Most that may remain in the server behind all requests: descriptors, threads, bytes.
MORE_FILES, MORE_THREADS, MORE_BYTES = 8, 8, 32 << 20
# Requests after which the server has all buffers that it will need.
WARM = 300
# Requests that were sent so many seconds apart begin in that order, however late a client reads.
APART_S = 1.0


@dataclass
class Load:
    """What is asked, and what came.

    Attributes:
        address: Host and port.
        answers: The text for each prompt.
        ends: How requests ended, as clients see it.
        began: When requests were sent, and when their first token came.
        wrong: What should not be, in words.
    """

    address: tuple[str, int]
    answers: list[str] = field(default_factory=list)
    ends: Counter = field(default_factory=Counter)
    began: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def open(self, body):
        """A connection on which a body was sent."""
        reader, writer = await asyncio.open_connection(*self.address)
        text = json.dumps(body).encode()
        head = f"Host: localhost\r\nContent-Length: {len(text)}\r\nConnection: close"
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + text)
        await writer.drain()
        return reader, writer

    async def get(self, path):
        """The body of another path."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        found = await reader.read()
        writer.close()
        return found.partition(b"\r\n\r\n")[2].decode()

    async def ask(self, prompt, how, noise):
        """One request, whose client leaves at `how`, or never."""
        body = {"prompt": prompt_of(prompt), "max_tokens": TOKENS, "temperature": 0}
        body |= {"logit_bias": UNENDING, "stream": how != "whole"}
        sent = time.monotonic()
        reader, writer = await self.open(body)
        try:
            if how == "queue":
                return
            if how == "prompt":
                await asyncio.sleep(noise.random() * 0.03)
                return
            status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
            if status != 200:
                self.wrong.append(f"status {status}: {(await reader.read())[:200]!r}")
                return
            if how == "whole":
                text = json.loads(b"".join(chunks(await reader.read())))["choices"][0]["text"]
            else:
                leaves = noise.randrange(1, TOKENS) if how == "answer" else None
                text = await self.read(reader, sent, leaves)
            if how != "answer" and text != self.answers[prompt]:
                self.wrong.append(f"{text!r} for prompt {prompt}, must be {self.answers[prompt]!r}")
        finally:
            writer.close()
            self.ends[how] += 1

    async def read(self, reader, sent, leaves):
        """The text of a stream, of so many tokens, or of all."""
        text, number = "", 0
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return text
            event = json.loads(line[6:])
            if "error" in event:
                return str(event)
            if number == 0:
                self.began.append((sent, time.monotonic()))
            text += event["choices"][0]["text"]
            number += 1
            if number == leaves:
                return text
        return text + " (no end)"


def chunks(body):
    """The parts of a body, whether it came in chunks or not."""
    if not re.match(rb"[0-9a-fA-F]+\r\n", body):
        return [body]
    parts, at = [], 0
    while size := int(body[at : body.index(b"\r\n", at)], 16):
        at = body.index(b"\r\n", at) + 2
        parts.append(body[at : at + size])
        at += size + 2
    return parts


def prompt_of(number):
    """The ids of a prompt; every fourth is long."""
    return [3 + (number * 7 + i) % 250 for i in range(1200 if number % 4 == 3 else 5 + number)]


def held(pid):
    """Descriptors, threads and resident bytes of a process."""
    with open(f"/proc/{pid}/statm") as listed:
        pages = int(listed.read().split()[1])
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return files, len(os.listdir(f"/proc/{pid}/task")), pages * os.sysconf("SC_PAGESIZE")


async def run(load, pid, num_requests, num_clients, seed):
    """Asks everything, and returns what the server held before, and what it holds behind it."""
    noise = random.Random(seed)
    for prompt in range(8):
        # The first answer to a prompt is what all others are compared with.
        load.answers.append("")
        reader, writer = await load.open(
            {"prompt": prompt_of(prompt), "max_tokens": TOKENS, "temperature": 0}
            | {"logit_bias": UNENDING}
        )
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        load.answers[prompt] = json.loads(b"".join(chunks(body)))["choices"][0]["text"]
        writer.close()
    kinds = ["stream"] * 5 + ["whole"] * 2 + ["queue", "prompt", "answer"]
    asked = [(noise.randrange(8), noise.choice(kinds)) for _ in range(num_requests)]

    async def client(requests):
        for prompt, how in requests:
            await load.ask(prompt, how, noise)

    async def all_of(part):
        shared = iter(part)
        await asyncio.gather(*(client(shared) for _ in range(num_clients)))
        end = time.monotonic() + 60
        while True:
            health = json.loads(await load.get("/health"))
            if health["waiting"] == health["running"] == 0:
                break
            assert time.monotonic() < end, "requests are left in the server"
            await asyncio.sleep(0.05)
        # Connections close behind the last answer.
        await asyncio.sleep(1)

    await all_of(asked[:WARM])
    before = held(pid)
    await all_of(asked[WARM:])
    return before, held(pid)


def out_of_order(began):
    """How many requests got their first token before one that was sent long before them."""
    found, latest = 0, 0.0
    waiting = sorted(began)
    # No request that was sent APART_S before this one may begin later.
    at = 0
    for sent, first in waiting:
        while waiting[at][0] < sent - APART_S:
            latest = max(latest, waiting[at][1])
            at += 1
        found += first < latest
    return found


def check(load, pid, num_requests, num_clients, seed):
    """Runs it all, and raises AssertionError for what is wrong. Returns the result in words."""
    start_s = time.monotonic()
    before, after = asyncio.run(run(load, pid, num_requests, num_clients, seed))
    took = time.monotonic() - start_s
    assert load.wrong == [], load.wrong[:5]
    assert load.ends.total() == num_requests
    text = asyncio.run(load.get("/metrics"))
    ended = dict(re.findall(r'^kccl_answers_total{end="(\w+)"} (\S+)$', text, re.MULTILINE))
    whole = load.ends["stream"] + load.ends["whole"]
    # A client may leave behind the last token, too.
    assert int(float(ended["max_tokens"])) >= whole + 8, ended
    assert "failed" not in ended, ended
    assert out_of_order(load.began) == 0
    most = before[0] + MORE_FILES, before[1] + MORE_THREADS, before[2] + MORE_BYTES
    assert all(a <= b for a, b in zip(after, most, strict=True)), (before, after)
    told = ", ".join(f"{number} {how}" for how, number in load.ends.most_common())
    return (
        f"{num_requests} requests ({told}) of {num_clients} clients in {took:.1f} s; descriptors, "
        f"threads, MB: {before[0]}, {before[1]}, {before[2] / 1e6:.0f} after {WARM}, "
        f"{after[0]}, {after[1]}, {after[2] / 1e6:.0f} at the end"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), LLAMA | {"max_position_embeddings": 2048}, with_tokenizer=True)
        server, url = start(folder, "--blocks", "1")
        try:
            host, _, port = url.removeprefix("http://").rpartition(":")
            load = Load((host, int(port)))
            print(check(load, server.pid, args.requests, args.clients, args.seed))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


if __name__ == "__main__":
    main()
