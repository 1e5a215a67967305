"""Defines the peers: other engines, which run on the same cores or GPUs with the same weights."""

from __future__ import annotations

import copy
import ctypes
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kccl

from .files import write_folder, write_gguf
from .peer import Peer, Room

Opener = Callable[[Room], Peer]

# transformers has two kinds of KV cache. The one that is faster for these tokens is measured.
_TRIAL_PROMPT, _TRIAL_TOKENS = 64, 6


class Transformers(Peer):
    """Hugging Face transformers in PyTorch, eager, with a dynamic or a static cache."""

    library = "transformers"

    def __init__(self, room: Room) -> None:
        import torch
        import transformers

        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._torch = torch
        transformers.utils.logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            write_folder(room.checkpoint, Path(folder))
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, room.checkpoint.dtype)
            ).eval()
        torch.set_num_threads(room.threads)
        self._makers = {
            "dynamic cache": lambda: transformers.DynamicCache(config=self._model.config),
            "static cache": lambda: transformers.StaticCache(
                config=self._model.config, max_cache_len=room.context
            ),
        }
        self.form = min(self._makers, key=self._trial)
        self.reset()

    def _trial(self, form: str) -> float:
        """Returns the seconds of _TRIAL_TOKENS tokens with this kind of KV cache."""
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
        # Copies the cache after the prompt, because releases differ in how they shorten a cache.
        self._cache = copy.deepcopy(self._kept)

    def close(self) -> None:
        del self._model, self._cache, self._kept


class LlamaCpp(Peer):
    """llama.cpp, through the C functions of llama-cpp-python."""

    library = "llama.cpp"

    def __init__(self, room: Room, *, is_on_gpu: bool = False) -> None:
        import llama_cpp

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._lib = llama_cpp
        self._vocab_size = room.checkpoint.config.vocab_size
        # The callback is kept as long as the model, because llama.cpp calls it at any time.
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._sampler: Any = None
        params = llama_cpp.llama_model_default_params()
        # No mmap: unlike a mapped file, anonymous memory may lie in huge pages.
        params.use_mmap = False
        params.n_gpu_layers = -1 if is_on_gpu else 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(room.checkpoint, path)
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise kccl.Error("llama.cpp cannot read the GGUF file")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = -(-room.context // 256) * 256
        settings.n_threads = settings.n_threads_batch = room.threads
        self._batch = settings.n_batch
        if is_on_gpu:
            self._use_gpu(settings)
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise kccl.Error(f"llama.cpp has no memory for a context of {room.context} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.reset()

    def _use_gpu(self, settings: Any) -> None:
        """Sets what is fastest on a GPU: flash attention, and choosing the token on the GPU."""
        lib = self._lib
        if not lib.llama_supports_gpu_offload():
            raise kccl.Error("llama-cpp-python was built without CUDA")
        self.backend = "cuda"
        settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(self._sampler, lib.llama_sampler_init_greedy())
        # Kept in an attribute, because llama.cpp reads this struct later, in llama_init_from_model.
        sampler = ctypes.cast(self._sampler, ctypes.c_void_p)
        self._of_sequence = lib.llama_sampler_seq_config(seq_id=0, sampler=sampler)
        settings.samplers = ctypes.pointer(self._of_sequence)
        settings.n_samplers = 1

    def _run(self, ids: Sequence[int]) -> int:
        lib = self._lib
        for first in range(0, len(ids), self._batch):
            some = ids[first : first + self._batch]
            tokens = (lib.llama_token * len(some))(*some)
            status = lib.llama_decode(self._context, lib.llama_batch_get_one(tokens, len(some)))
            if status != 0:
                raise kccl.Error(f"llama_decode returned {status}")
        if self._sampler is not None:
            token = int(lib.llama_get_sampled_token_ith(self._context, -1))
            self.form = f"token picked on the {'GPU' if token >= 0 else 'host'}"
            if token >= 0:
                return token
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
        if self._sampler is not None:
            self._lib.llama_sampler_free(self._sampler)
        self._lib.llama_model_free(self._model)


def _llama_cpp_on_gpu(room: Room) -> Peer:
    if room.checkpoint.weights:
        raise kccl.Error("the file it would read has no rounding of --weights")
    return LlamaCpp(room, is_on_gpu=True)


def _torch(name: str) -> Opener:
    """Returns an opener that imports pytorch/peer.py, and so PyTorch, when it is called."""

    def opened(room: Room) -> Peer:
        from .pytorch import peer

        found: Peer = getattr(peer, name)(room)
        return found

    return opened


PEERS: dict[str, dict[str, Opener]] = {
    "host": {"transformers": Transformers, "llama.cpp": LlamaCpp},
    "GPU": {"torch": _torch("alone"), "llama.cpp": _llama_cpp_on_gpu},
    "GPUs": {"torch+nccl": _torch("with_nccl"), "torch+kccl": _torch("with_kccl")},
}
"""Place -> library -> its opener. On several GPUs, all ranks must call it together."""


def peers_for(backend: str, world_size: int) -> Mapping[str, Opener]:
    """Returns the peers for an engine's backend and number of ranks: library -> opener."""
    if backend == "host":
        return PEERS["host"]
    return PEERS["GPU" if world_size == 1 else "GPUs"]
