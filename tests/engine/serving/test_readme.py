"""The lines of the README that start a server and ask it, with another port and a tiny model."""

import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import openai
import pytest
import yaml
from test_openai import start

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
OWN = (ROOT / "engine/serving/README.md").read_text()
THERE = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url(chat_model):
    (line,) = re.findall(r"^kccl serve .*", README, re.MULTILINE)
    words = shlex.split(line, comments=True)
    assert THERE in line and words[2:4] == ["--model", "smollm2"]
    server, url = start(chat_model, *words[4:], "--blocks", "1", "--served-model-name", "smollm2")
    yield url
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    server.stderr.close()


def test_the_line_of_curl(url):
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    (line,) = re.findall(r"^curl .*", README, re.MULTILINE)
    words = shlex.split(line.replace(THERE, url))
    answer = subprocess.run([*words, "-s"], capture_output=True, timeout=60, check=True).stdout
    assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"


def test_the_line_of_openai_python(url):
    (line,) = re.findall(r"`(OpenAI\(.*?\))`", README)
    with eval(line.replace(THERE, url), {"OpenAI": openai.OpenAI}) as client:
        assert [each.id for each in client.models.list()] == ["smollm2"]


def test_the_settings_of_clients_name_this_server(url):
    """As far as they can be read here: the URL, a key, and the model."""
    (text,) = re.findall(r"```yaml\n(.*?)```", OWN, re.DOTALL)
    (model,) = yaml.safe_load(text)["models"]
    asked = [(model["apiBase"], model["apiKey"], model["model"])]
    found = re.findall(r"API_BASE(?:_URL)?=(\S+) OPENAI_API_KEY=(\S+)(.*)", OWN)
    assert len(found) == 2
    asked += [
        (base, key, name[1] if (name := re.search(r"openai/(\S+)", rest)) else "smollm2")
        for base, key, rest in found
    ]
    for base, key, name in asked:
        with openai.OpenAI(base_url=base.replace(THERE, url), api_key=key) as client:
            assert client.models.retrieve(name).id == name
