"""A server whose model says what a test wants, token by token, over a real socket."""

import contextlib
import json
import threading
import time

import openai
import uvicorn
from tiny_models import LLAMA, write_folder
from tokenizers import AddedToken, Tokenizer

from kccl.engine import Engine
from kccl.engine.model.executor import EndedElsewhere, Token
from kccl.engine.serving.http.app import application
from kccl.engine.serving.http.service import Settings

EOS = 1


def write_model(folder, template, tokens=()):
    """Writes a tiny model with this chat template.

    Args:
        folder: Where.
        template: The template.
        tokens: Tokens to add: the text, and whether it is a control token.
    """
    write_folder(folder, LLAMA | {"max_position_embeddings": 2048}, with_tokenizer=True)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, special in tokens:
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


class Script:
    """What the model says next, and what it was asked.

    Attributes:
        answers: Texts to come, control tokens spelt out. The last one stays.
        prompts: The ids of each prompt.
        params: How the tokens of each were to be chosen.
        pause_s: Seconds between two tokens.
        is_cancelled: Whether an answer was.
    """

    def __init__(self, engine):
        self.answers, self.prompts, self.params = [""], [], []
        self.pause_s, self.is_cancelled = 0, threading.Event()
        self._engine = engine

    def asked(self):
        """The newest prompt, control tokens spelt out."""
        tokenizer = self._engine.tokenizer
        ids = self.prompts[-1]
        stream = tokenizer.stream(tokenizer.special_ids)
        return "".join(map(stream.push, ids))

    def id_of(self, name):
        """The id of a token."""
        return self._engine.tokenizer.id_of(name)

    def tokens(self, ids, params, *, cancellation=None, **_):
        """Stands for Runner.tokens()."""
        self.prompts.append(ids)
        self.params.append(params)
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(text, Exception):
            raise text
        said = [*self._engine.tokenizer.encode(text, add_bos=False), EOS]
        for index, number in enumerate(said):
            if cancellation is not None and cancellation.is_asked:
                self.is_cancelled.set()
                raise EndedElsewhere
            time.sleep(self.pause_s)
            is_full = index + 1 == params.max_tokens
            end = "stop" if number == EOS else "max_tokens" if is_full else ""
            yield Token(number, 0.0, end, time.monotonic())
            if end:
                return


@contextlib.contextmanager
def served(app):
    """Serves an application in a thread; yields its URL."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@contextlib.contextmanager
def scripted(folder, template, tokens=()):
    """Yields (client, script) for a model; arguments as write_model()'s."""
    write_model(folder, template, tokens)
    with Engine(folder, blocks=1) as engine:
        script = Script(engine)
        vars(engine._runner)["tokens"] = script.tokens
        with served(application(engine, Settings(names=("tiny",)))) as url:
            given = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
            with openai.OpenAI(**given) as client:
                yield client, script
