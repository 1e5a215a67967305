"""Checks the prompt and the parameters of a request to an Engine before the request runs."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import kccl

from ..base.scalars import as_integer
from ..model.config import ModelConfig
from ..model.sample import FILTERS, SamplingParams
from ..text.tokenizer import Tokenizer


def integer(name: str, value: Any) -> int:
    """Returns `value` as a Python integer.

    Raises:
        InvalidArgument: The value is no integer. The error names `name`.
    """
    found = as_integer(value)
    if found is None:
        raise kccl.InvalidArgument(f"{name} is {value!r}, must be an integer")
    return found


def check_ids(ids: Sequence[int], context: int, room: int = 0) -> list[int]:
    """Checks the number of ids, and returns them as a list.

    Args:
        ids: The tokens' ids.
        context: The number of ids that there is room for.
        room: How many of these places must stay free.

    Raises:
        InvalidArgument: There is no id, or there are too many.
    """
    most = context - room
    if not 0 < len(ids) <= most:
        raise kccl.InvalidArgument(
            f"ids has {len(ids)} tokens, must have from 1 to {most} in a context of {context}"
        )
    return list(ids)


def prompt_ids(
    prompt: str | Sequence[int], encode: Callable[[str], list[int]], vocab_size: int
) -> list[int]:
    """Returns the ids of a prompt.

    Args:
        prompt: Text, or ids.
        encode: Turns text into ids.
        vocab_size: The number of the model's ids. All ids must be below it.

    Raises:
        InvalidArgument: The prompt is empty, or has an id that does not exist.
    """
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise kccl.InvalidArgument(
            f"the prompt is of type {type(prompt).__name__}, must be text or ids"
        )
    if isinstance(prompt, str):
        # An empty text is refused below, although some tokenizers would encode it as BOS.
        ids = encode(prompt) if prompt else []
    else:
        given = list(prompt)
        if isinstance(prompt, Mapping) or any(isinstance(each, Mapping) for each in given):
            raise kccl.InvalidArgument(
                "the prompt has messages, must be text or ids: engine.tokenizer.chat(messages) "
                "gives the ids of a conversation"
            )
        ids = [integer("an id of the prompt", number) for number in given]
    if not ids:
        raise kccl.InvalidArgument("the prompt is empty, must have at least one token")
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise kccl.InvalidArgument(
            f"the prompt has id {wrong[0]}, must be from 0 to {vocab_size - 1}"
        )
    return ids


def context_of(config: ModelConfig, context: int | None) -> int:
    """Returns the number of tokens that an engine makes room for. If `context` is None, that is the
    model's context, but at most 4096.

    Raises:
        InvalidArgument: `context` is no integer, or not from 1 to the model's longest context.
    """
    found = min(config.context, 4096) if context is None else integer("context", context)
    most = config.longest_context
    if not 1 <= found <= most:
        raise kccl.InvalidArgument(f"context is {context}, must be from 1 to the model's, {most}")
    return found


def no_tokenizer(source: object, lacks: str = "has no tokenizer") -> kccl.Error:
    """Returns the error for a text when `source`, a model, `lacks` a tokenizer that could encode
    it.
    """
    return kccl.Error(f"{source} {lacks}: give ids instead of text, on the command line by --ids")


def encoded(tokenizer: Tokenizer | None, source: object, lacks: str, text: str) -> list[int]:
    """Returns the ids of a text. Raises the error of no_tokenizer() if there is no tokenizer."""
    if tokenizer is None:
        raise no_tokenizer(source, lacks)
    return tokenizer.encode(text)


def check_needs_no_text(params: SamplingParams, why: str) -> None:
    """Raises InvalidArgument if a request needs text, because it has stop strings or a grammar.
    `why` says why there is no text.
    """
    if params.stop:
        raise kccl.InvalidArgument(f"stop is {params.stop!r}, must be empty: {why}")
    if params.grammar is not None:
        raise kccl.InvalidArgument(f"grammar is given, must be None: {why}")


def check_room(ids: Sequence[int], room: int, config: ModelConfig, context: int) -> None:
    """Checks the length of a prompt.

    Raises:
        InvalidArgument: The prompt has more than `room` ids.
    """
    if len(ids) > room:
        most = config.longest_context
        more = f"; give a larger context (--context), at most {most}"
        raise kccl.InvalidArgument(
            f"the prompt has {len(ids)} tokens, must have at most {room} in a context of "
            f"{context}{more if most > context else ''}"
        )


def params_of(
    params: SamplingParams | None,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    wrong: Mapping[str, str],
    ends: tuple[int, ...],
    vocab_size: int,
) -> SamplingParams:
    """Returns the parameters of a request.

    Args:
        params: All parameters. If None, they are made from `given` and `defaults`.
        given: Parameters by name. Must be empty if `params` is given.
        defaults: The values that the model's files have for parameters that are not given.
        wrong: Name of a parameter -> what is wrong with its value in the model's files.
        ends: The stop ids, unless `stop_ids` is given.
        vocab_size: The ids of logit_bias must be below it.

    Raises:
        InvalidArgument: A parameter is wrong, or there is none of this name.
        kccl.Error: The request would use a parameter whose value in the model's files is wrong.
    """
    found = _params_of(params, given, defaults, ends)
    for name, told in wrong.items() if params is None else ():
        # With temperature 0 filters have no effect, so a wrong one does not matter.
        if name not in given and (found.temperature > 0 or name not in FILTERS):
            raise kccl.Error(f"{told}; give another {name}")
    for number, _ in found.biases:
        # The ids of logit_bias are checked here, because executors do not check them.
        if not 0 <= number < vocab_size:
            raise kccl.InvalidArgument(
                f"logit_bias has id {number}, must have ids from 0 to {vocab_size - 1}"
            )
    return found


def _params_of(
    params: SamplingParams | None,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    ends: tuple[int, ...],
) -> SamplingParams:
    if params is None:
        unknown = given.keys() - SamplingParams.__dataclass_fields__.keys()
        if unknown:
            name, known = min(unknown), list(SamplingParams.__dataclass_fields__)
            meant = difflib.get_close_matches(name, known, 1)
            told = f"did you mean {meant[0]}?" if meant else f"must be one of {', '.join(known)}"
            raise kccl.InvalidArgument(f"there is no parameter {name}: {told}")
        return SamplingParams(**{"stop_ids": ends, **defaults, **given})
    if given:
        raise kccl.InvalidArgument(f"both params and {next(iter(given))} are given")
    if not isinstance(params, SamplingParams):
        raise kccl.InvalidArgument(
            f"params is of type {type(params).__name__}, must be SamplingParams"
        )
    return params
