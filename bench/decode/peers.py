"""Other engines on the same CPU cores and the same weights: transformers and llama.cpp."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kccl
from kccl.engine.checkpoint import Checkpoint

from .files import write_folder, write_gguf

# transformers has two caches. The one that is faster for these tokens is measured.
_TRIAL_PROMPT, _TRIAL_TOKENS = 64, 6
# Characters of a foreign error that are shown.
_CAUSE = 200


class Peer(ABC):
    """Another engine that has opened a model. It decodes greedily, one token at a time.

    Attributes:
        library: Its name in rows.
        form: Which of its forms is measured; "" if there is one only.
        version: Of the library.
    """

    library: str
    form: str = ""
    version: str

    @abstractmethod
    def reset(self) -> None:
        """Forgets all tokens."""

    @abstractmethod
    def extend(self, ids: Sequence[int]) -> int:
        """Appends a prompt to what rewind() goes back to. Returns the likeliest next id."""

    @abstractmethod
    def step(self, token: int) -> int:
        """Appends a token. Returns the likeliest next id."""

    @abstractmethod
    def rewind(self) -> None:
        """Forgets the tokens of step()."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model."""

    def timed(self, token: int, num_tokens: int) -> tuple[list[int], list[float]]:
        """Decodes after `token`, after rewind(). As Engine.timed(), from the first token on."""
        tokens, times = [], [time.monotonic()]
        for _ in range(num_tokens):
            token = self.step(token)
            tokens.append(token)
            times.append(time.monotonic())
        return tokens, times


class Transformers(Peer):
    """Hugging Face transformers in PyTorch, eager, with a dynamic or a static cache."""

    library = "transformers"

    def __init__(self, checkpoint: Checkpoint, context: int, threads: int) -> None:
        import torch
        import transformers

        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._torch = torch
        transformers.utils.logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            write_folder(checkpoint, Path(folder))
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, checkpoint.dtype)
            ).eval()
        torch.set_num_threads(threads)
        self._makers = {
            "dynamic cache": lambda: transformers.DynamicCache(config=self._model.config),
            "static cache": lambda: transformers.StaticCache(
                config=self._model.config, max_cache_len=context
            ),
        }
        self.form = min(self._makers, key=self._trial)
        self.reset()

    def _trial(self, form: str) -> float:
        """Seconds that some tokens take."""
        self.form = form
        self.reset()
        token = self.extend([1] * _TRIAL_PROMPT)
        _, times = self.timed(token, _TRIAL_TOKENS)
        return times[-1] - times[0]

    def _run(self, ids: Sequence[int]) -> int:
        torch = self._torch
        with torch.inference_mode():
            out = self._model(
                torch.tensor([list(ids)]), past_key_values=self._cache, logits_to_keep=1
            )
            return int(out.logits[0, -1].argmax())

    def reset(self) -> None:
        self._cache = self._makers[self.form]()
        self._kept = None

    def extend(self, ids: Sequence[int]) -> int:
        token = self._run(ids)
        self._kept = copy.deepcopy(self._cache)
        return token

    def step(self, token: int) -> int:
        return self._run([token])

    def rewind(self) -> None:
        # The kept one stays as it is. Releases differ in how they shorten a cache.
        self._cache = copy.deepcopy(self._kept)

    def close(self) -> None:
        del self._model, self._cache, self._kept


class LlamaCpp(Peer):
    """llama.cpp, through the C functions of llama-cpp-python."""

    library = "llama.cpp"

    def __init__(self, checkpoint: Checkpoint, context: int, threads: int) -> None:
        import llama_cpp

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._lib = llama_cpp
        self._vocab_size = checkpoint.config.vocab_size
        # Kept as long as the model: llama.cpp calls it.
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        # Anonymous memory may lie in huge pages.
        params.use_mmap = False
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(checkpoint, path)
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise kccl.Error("llama.cpp cannot read the GGUF file")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = -(-context // 256) * 256
        settings.n_threads = settings.n_threads_batch = threads
        self._batch = settings.n_batch
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise kccl.Error(f"llama.cpp has no memory for a context of {context} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.reset()

    def _run(self, ids: Sequence[int]) -> int:
        lib = self._lib
        for first in range(0, len(ids), self._batch):
            some = ids[first : first + self._batch]
            tokens = (lib.llama_token * len(some))(*some)
            status = lib.llama_decode(self._context, lib.llama_batch_get_one(tokens, len(some)))
            if status != 0:
                raise kccl.Error(f"llama_decode returned {status}")
        logits = lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def reset(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)
        self._length = 0

    def extend(self, ids: Sequence[int]) -> int:
        self._length += len(ids)
        return self._run(ids)

    def step(self, token: int) -> int:
        return self._run([token])

    def rewind(self) -> None:
        self._lib.llama_memory_seq_rm(self._memory, 0, self._length, -1)

    def close(self) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


PEERS: dict[str, type[Any]] = {"transformers": Transformers, "llama.cpp": LlamaCpp}


def cause_of(error: Exception) -> str:
    """Why a peer is missing, in one line."""
    text = " ".join(str(error).split())[:_CAUSE]
    return text if isinstance(error, kccl.Error) else f"{type(error).__name__}: {text}"
