"""Asks a server of the engine by OpenAI's own client, and ends the server.

python examples/12_openai_client.py

It needs `pip install openai`. Where a server runs already, only the lines with `client` are needed.
"""

import re
import subprocess
import sys

from openai import OpenAI

# The small model that comes with KCCL continues Python. Chats need a chat model: --model smollm2.
command = [sys.executable, "-m", "kccl", "serve", "--model", "bundled", "-n", "2", "--port", "0"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    assert server.stderr is not None
    try:
        told = ""
        for line in server.stderr:
            told += line
            if found := re.search(r"listening on (http://\S+)", line):
                break
        else:
            sys.exit(f"the server has not started:\n{told}")
        client = OpenAI(base_url=f"{found[1]}/v1", api_key="none")
        stream = client.completions.create(
            model="bundled",
            prompt="class Stack:",
            max_tokens=40,
            temperature=0.6,
            seed=1,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        print()
    finally:
        server.terminate()
