"""Reads a request to `kccl generate`, and checks it before the weights are read."""

import argparse
import os
import select
import sys
from dataclasses import dataclass
from typing import Any

import kccl

from ..executors.opening import drafts_for, read_for
from ..executors.requests import check_room, context_of, no_tokenizer, prompt_ids
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.models import find_model
from ..text.tokenizer import check_utf8
from .options import sampling, stop_ids
from .prompts import check_prompt_arguments, given_ids, prompt_of

# How many seconds the other ranks wait for rank 0 before they time out. It is long, because at rank
# 0 a person may still type a prompt, or a model may be downloaded. If rank 0 ends, the others
# notice at once.
_ASKING_S = 3600.0
# Under a launcher, standard input is a pipe even if a person types. If it has no data for this many
# seconds, a hint to type the prompt is printed.
_SILENT_S = 1.0


@dataclass(frozen=True)
class Asked:
    """A request, and the opened model for it.

    Attributes:
        checkpoint: The model. The caller must close it.
        ids: The prompt's ids.
        is_text: Whether the prompt was given as text. If not, its ids were given.
        prompt: The prompt as it was given, a text or ids. "" on ranks other than 0 if it was a
            text.
        params: Those fields of SamplingParams for which options were given.
    """

    checkpoint: Checkpoint
    ids: list[int]
    is_text: bool
    prompt: str
    params: dict[str, Any]


def ask(args: argparse.Namespace) -> Asked | None:
    """Reads the prompt and opens the model. Collective: every rank must call it. Only rank 0 reads
    the prompt and raises errors, because a launcher gives its standard input to rank 0 only.

    Returns:
        The request. None on the other ranks if rank 0 raises.

    Raises:
        InvalidArgument: An option is wrong, the prompt is empty or too long.
        kccl.Error: The model cannot be opened, or has no tokenizer or no template for the prompt.
    """
    if kccl.launched_rank() is None:
        return _asked(args)
    with kccl.init("host") as comm:
        comm.timeout = max(comm.timeout, _ASKING_S)
        if comm.rank != 0:
            ids = comm.gather_objects(None)[0]
            return None if ids is None else _of_ids(args, ids)
        try:
            asked = _asked(args)
        except Exception:
            comm.gather_objects(None)
            raise
        comm.gather_objects(asked.ids)
        return asked


def _asked(args: argparse.Namespace) -> Asked:
    # Checks options first, before a person types a prompt or a model is opened.
    params = sampling(args)
    check_prompt_arguments(args)
    if args.ids is not None:
        return _checked(args, _of_ids(args, given_ids(args.ids)))
    prompt = _standard_input(is_quiet=args.quiet) if args.prompt is None else args.prompt
    if not prompt:
        raise kccl.InvalidArgument("the prompt is empty: give --prompt, or pipe it")
    check_utf8(prompt)
    checkpoint = open_checkpoint(find_model(args.model))
    try:
        if not checkpoint.has_tokenizer:
            raise no_tokenizer(checkpoint.source)
        ids = prompt_of(checkpoint.tokenizer(), prompt, args)
    except BaseException:
        checkpoint.close()
        raise
    return _checked(args, Asked(checkpoint, ids, True, prompt, params))


def _of_ids(args: argparse.Namespace, ids: list[int]) -> Asked:
    checkpoint = open_checkpoint(find_model(args.model))
    return Asked(checkpoint, ids, args.ids is None, args.ids or "", sampling(args))


def _checked(args: argparse.Namespace, asked: Asked) -> Asked:
    """Returns the request unchanged. Checks first that the backend supports the dtype and the
    drafts, that the vocabulary has the ids, and that they leave room for an answer. Closes the
    checkpoint and raises if a check fails.
    """
    config = asked.checkpoint.config
    try:
        read_for(asked.checkpoint, args.backend, args.dtype, args.weights)
        drafts_for(args.backend, args.drafts)
        stop_ids(args, (), config.vocab_size)
        ids = prompt_ids(asked.ids, lambda _: [], config.vocab_size)
        context = context_of(config, args.context)
        check_room(ids, context - 1, config, context)
    except BaseException:
        asked.checkpoint.close()
        raise
    return asked


def _standard_input(*, is_quiet: bool) -> str:
    """Reads standard input. Bytes that are not UTF-8 become surrogates, as in arguments."""
    if os.isatty(0) or (not is_quiet and _is_silent()):
        sys.stderr.write("type the prompt, then Enter and Ctrl-D\n")
        sys.stderr.flush()
    return sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")


def _is_silent() -> bool:
    """Tells whether this process was started by a launcher and its standard input has no data for
    _SILENT_S seconds.
    """
    return kccl.launched_rank() is not None and not select.select([0], [], [], _SILENT_S)[0]
