"""How a model's folder asks to be sampled: generation_config.json, as transformers reads it."""

from pathlib import Path
from typing import Any

import kccl

from .fields import Fields, read_json
from .sample import SamplingParams

FILE = "generation_config.json"
# transformers' own values, where the file asks for sampling and does not give them.
_TEMPERATURE, _TOP_K = 1.0, 50
# Fields that choose other tokens, which the engine has not -> the values with which they do not.
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
}


def read_defaults(source: Path) -> tuple[dict[str, Any], list[str]]:
    """What generation_config.json beside the weights says.

    Without `do_sample: true` the likeliest token is taken, whatever the temperature in the file;
    its filters then are for callers who give a temperature.

    Args:
        source: The model's folder. A GGUF file has no such file, nor has the bundled model.

    Returns:
        Fields of SamplingParams; and a sentence for each field that the engine does not have.

    Raises:
        kccl.Error: The file is damaged, or a value is out of range.
    """
    file = source / FILE
    if not source.is_dir() or not file.exists():
        return {}, []
    fields = Fields(file, read_json(file))
    found: dict[str, Any] = {}
    for name in ("top_p", "min_p", "repetition_penalty"):
        if name in fields:
            found[name] = fields.number(name)
    if "top_k" in fields:
        found["top_k"] = fields.integer("top_k", least=0)
    if fields.boolean("do_sample", default=False):
        found["temperature"] = fields.number("temperature", default=_TEMPERATURE)
        found.setdefault("top_k", _TOP_K)
    try:
        SamplingParams(**found)
    except kccl.InvalidArgument as error:
        raise kccl.Error(f"{file}: {error}") from error
    notices = [
        f"{FILE} asks for {name} = {fields.value(name)!r:.60}, which the engine does not have"
        for name, neutral in _UNKNOWN.items()
        if name in fields and fields.value(name) not in neutral
    ]
    return found, notices
