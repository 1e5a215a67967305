"""Reads the sampling parameters that a model's files ask for.

A folder has them in generation_config.json, or else in config.json; they are read as transformers
does. A GGUF file has them in its keys; they are read as llama.cpp does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kccl

from ..base.fields import Fields, read_optional
from ..model.sample import SamplingParams

FILE = "generation_config.json"
_OLDER = "config.json"
# What transformers uses if the file has do_sample without temperature or top_k.
_TEMPERATURE, _TOP_K = 1.0, 50
# Fields of ways to choose tokens that the engine does not have -> the values with which they have
# no effect. Any other value gives a notice.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "dola_layers": (),
    "top_h": (),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_return_sequences": (1,),
    "watermarking_config": (),
    "max_time": (),
    "token_healing": (False,),
    "forced_decoder_ids": ([],),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "force_words_ids": ([],),
    "constraints": ([],),
}
# Fields that bound the answer's length -> transformers' defaults, which give no notice. The engine
# ignores these fields: max_tokens bounds the answer.
_LENGTHS: dict[str, tuple[Any, ...]] = {"max_new_tokens": (), "max_length": (20,)}


# llama.cpp's keys without "general.sampling." -> fields of SamplingParams.
_OF_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_GGUF = "general.sampling."
# Keys of samplers that the engine does not have -> the values with which they have no effect.
_UNKNOWN_IN_GGUF: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "xtc_probability": (0.0,),
    "sequence": ("", "edskypmxt"),
}
# How many of the last tokens llama.cpp's penalty_repeat counts if penalty_last_n is missing; and
# the value of penalty_last_n that counts all tokens.
_LAST_N, _ALL = 64, -1


@dataclass(frozen=True)
class Defaults:
    """The sampling parameters that a model's files ask for.

    Attributes:
        values: Field of SamplingParams -> its value in the files.
        wrong: Field of SamplingParams -> what is wrong with its value in the files. Requests that
            would use this field are refused.
        notices: Sentences, one for each field of the files that is not used.
    """

    values: Mapping[str, Any]
    wrong: Mapping[str, str]
    notices: tuple[str, ...]

    def without_text(self) -> "Defaults":
        """Returns the defaults for an engine that has no tokenizer, and so no stop strings."""
        values, wrong = dict(self.values), dict(self.wrong)
        wrong.pop("stop", None)
        if (stop := values.pop("stop", None)) is None:
            return Defaults(values, wrong, self.notices)
        told = f"stop_strings = {stop!r:.60} is not used without a tokenizer"
        return Defaults(values, wrong, (*self.notices, told))


class _Reader:
    """Collects fields of SamplingParams from a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}
        self.wrong: dict[str, str] = {}

    def take(self, name: str, read: Callable[[], Any]) -> None:
        """Calls `read`, and stores its value as field `name`. Stores why the field is wrong if
        read() or SamplingParams raises.
        """
        try:
            value = read()
            SamplingParams(**{name: value})
        except kccl.InvalidArgument as error:
            self.wrong[name] = f"{self._path}: {error}"
        except kccl.Error as error:
            self.wrong[name] = str(error)
        else:
            self.values[name] = value

    def done(self, notices: list[str]) -> Defaults:
        """Returns the collected fields, with the caller's notices after those for wrong fields."""
        unusable = [f"{told}; requests that use it are refused" for told in self.wrong.values()]
        return Defaults(self.values, self.wrong, (*unusable, *notices))


def read_defaults(folder: Path) -> Defaults:
    """Reads a folder's generation_config.json; config.json if it has none.

    Without `do_sample: true` the file's temperature is ignored, so the likeliest token is chosen.
    The file's filters then have an effect only if the caller gives a temperature.

    Raises:
        kccl.Error: The file is damaged.
    """
    file = folder / FILE if (folder / FILE).exists() else folder / _OLDER
    fields = Fields(file, read_optional(file))
    found = _Reader(file)
    for name in ("top_p", "min_p", "repetition_penalty"):
        if name in fields:
            found.take(name, partial(fields.number, name))
    if "top_k" in fields:
        found.take("top_k", partial(fields.integer, "top_k", least=0))
    try:
        samples = fields.boolean("do_sample", default=False)
    except kccl.Error as error:
        # do_sample decides whether the temperature counts, so the field `temperature` counts as
        # wrong, too.
        found.wrong["temperature"], samples = str(error), False
    if samples:
        found.take("temperature", partial(fields.number, "temperature", default=_TEMPERATURE))
        if "top_k" not in fields:
            found.values["top_k"] = _TOP_K
    if fields.value("stop_strings"):
        found.take("stop", partial(fields.value, "stop_strings"))
    return found.done(
        [
            f"{file.name} asks for {name} = {fields.value(name)!r:.60}, which {told}"
            for names, told in (
                (_UNKNOWN, "the engine does not have"),
                (_LENGTHS, "is not used: max_tokens limits an answer"),
            )
            for name, neutral in names.items()
            if name in fields and fields.value(name) not in neutral
        ]
    )


def defaults_of_gguf(path: Path, metadata: Mapping[str, Any]) -> Defaults:
    """Reads a GGUF file's keys. If they have no temperature, the likeliest token is chosen."""
    fields = Fields(path, metadata)
    found = _Reader(path)
    for key, name in _OF_GGUF.items():
        if f"{_GGUF}{key}" in fields:
            found.take(name, partial(_number_of_gguf, fields, key))
    notices = [
        f"{path.name} asks for {_GGUF}{key} = {fields.value(_GGUF + key)!r:.60}, which the engine "
        "does not have"
        for key, neutral in _UNKNOWN_IN_GGUF.items()
        if f"{_GGUF}{key}" in fields and fields.value(_GGUF + key) not in neutral
    ]
    penalty = fields.value(f"{_GGUF}penalty_repeat")
    last = fields.value(f"{_GGUF}penalty_last_n")
    if penalty not in (None, 1) and last == _ALL:
        found.take("repetition_penalty", partial(fields.number, f"{_GGUF}penalty_repeat"))
    elif penalty not in (None, 1) and last != 0:
        notices.append(
            f"{path.name} asks for {_GGUF}penalty_repeat = {penalty!r:.60}, which is not used: it "
            f"counts the last {_LAST_N if last is None else last!r:.60} tokens, and "
            "repetition_penalty all of them"
        )
    return found.done(notices)


def _number_of_gguf(fields: Fields, key: str) -> float:
    """Returns a key's number. Clamps it to the key's range, as llama.cpp does."""
    name = f"{_GGUF}{key}"
    if key == "top_k":
        return max(fields.integer(name), 0)
    value = fields.number(name)
    return min(max(value, 0.0), 1.0) if key in ("top_p", "min_p") else max(value, 0.0)
