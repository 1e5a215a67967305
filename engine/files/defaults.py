"""Reads how a model's folder asks to be sampled: generation_config.json, or else config.json, as
transformers reads them.
"""

from pathlib import Path
from typing import Any

import kccl

from ..base.fields import Fields, read_optional
from ..model.sample import SamplingParams

FILE = "generation_config.json"
_OLDER = "config.json"
# The values that transformers uses if the file asks for sampling and does not give them.
_TEMPERATURE, _TOP_K = 1.0, 50
# Fields of other ways to choose tokens, which the engine does not have, and the values with which
# they change nothing.
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
}
# Fields that bound the answer's length, and transformers' own values. The engine ignores them: the
# caller's max_tokens counts, or its default.
_LENGTHS: dict[str, tuple[Any, ...]] = {"max_new_tokens": (), "max_length": (20,)}


def read_defaults(source: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns what generation_config.json beside the weights says; config.json if there is none.

    Without `do_sample: true` the likeliest token is taken, whatever the temperature in the file;
    its filters then are for callers who give a temperature.

    Args:
        source: The model's folder. A GGUF file has no such file.

    Returns:
        Fields of SamplingParams; and a sentence for each field that is not used.

    Raises:
        kccl.Error: The file is damaged, or a value is out of range.
    """
    if not source.is_dir():
        return {}, []
    file = source / FILE if (source / FILE).exists() else source / _OLDER
    fields = Fields(file, read_optional(file))
    found: dict[str, Any] = {}
    for name in ("top_p", "min_p", "repetition_penalty"):
        if name in fields:
            found[name] = fields.number(name)
    if "top_k" in fields:
        found["top_k"] = fields.integer("top_k", least=0)
    if fields.boolean("do_sample", default=False):
        found["temperature"] = fields.number("temperature", default=_TEMPERATURE)
        found.setdefault("top_k", _TOP_K)
    if stop := fields.value("stop_strings"):
        found["stop"] = stop
    try:
        SamplingParams(**found)
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{file}: {error}") from error
    notices = [
        f"{file.name} asks for {name} = {fields.value(name)!r:.60}, which {told}"
        for names, told in (
            (_UNKNOWN, "the engine does not have"),
            (_LENGTHS, "is not used: max_tokens limits an answer"),
        )
        for name, neutral in names.items()
        if name in fields and fields.value(name) not in neutral
    ]
    return found, notices
