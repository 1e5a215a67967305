"""RoPE's scalings against Hugging Face transformers: its forward without a cache at each length."""

import json

import numpy as np
import pytest
import torch
from test_transformers import write
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kccl.engine import Engine
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.long

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE |= {"max_position_embeddings": 64, "pad_token_id": None}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 16},
    **{"short_factor": np.linspace(1, 1.5, 8).tolist()},
    **{"long_factor": np.linspace(1, 9, 8).tolist()},
}
OUTSIDE = {"original_max_position_embeddings": 24}
# The parameters, and fields of config.json beside them.
KINDS = {
    "default": ({"rope_type": "default"}, {}),
    "linear": ({"rope_type": "linear", "factor": 3.0}, {}),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, {"max_position_embeddings": 20}),
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 16}, {}),
    "llama3, original outside": (LLAMA3 | {"original_max_position_embeddings": 16}, OUTSIDE),
    "llama3, no original": (LLAMA3, {}),
    "yarn": (YARN, {}),
    "yarn, original outside": (YARN, OUTSIDE),
    "yarn, no original": ({"rope_type": "yarn", "factor": 4.0}, {}),
    "yarn, no factor": (YARN | {"factor": None}, {}),
    "yarn, attention_factor": (YARN | {"attention_factor": 1.3}, {}),
    "yarn, mscale of both": (YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}, {}),
    "yarn, mscale": (YARN | {"mscale": 0.7}, {}),
    "yarn, betas": (YARN | {"beta_fast": 2.0, "beta_slow": 0.5}, {}),
    "yarn, no truncation": (YARN | {"truncate": False, "beta_fast": 4.0}, {}),
    "yarn, falling ramp": (YARN | {"beta_slow": 9.0, "original_max_position_embeddings": 2}, {}),
    "longrope": (LONG, {}),
    "longrope, original outside": (LONG, OUTSIDE),
    "longrope, factor": (LONG | {"factor": 3.0}, {}),
    "longrope, attention_factor": (LONG | {"attention_factor": 1.4}, {}),
}
IDS = np.random.default_rng(5).integers(SHAPE["vocab_size"], size=64).tolist()
# Up to the original contexts, and beyond them.
PROMPTS = [IDS[:length] for length in (16, 17, 20, 21, 25, 48)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each model; only the configuration differs between the kinds."""
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, (kind, config) in MODELS.items():
        write(made[name], kind, config)
    return made


def use(folder, kind, spelling):
    """Gives a folder's configuration a kind of RoPE."""
    parameters, beside = KINDS[kind]
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 64}
    for name in ("rope_parameters", "rope_scaling", "rope_theta", *OUTSIDE):
        config.pop(name, None)
    if spelling == "old":
        renamed = {("type" if n == "rope_type" else n): value for n, value in parameters.items()}
        config |= {"rope_scaling": renamed, "rope_theta": 50.0}
    else:
        config |= {"rope_parameters": parameters | {"rope_theta": 50.0}}
    path.write_text(json.dumps(config | beside))


def by_transformers(name, folder, sequences):
    """The logits of each sequence."""
    kind = MODELS[name][0]
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    for ids in sequences:
        # Its frequencies depend on the requests before.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        with torch.no_grad():
            found.append(model(torch.tensor([ids]), use_cache=False).logits[0].numpy())
    return found


# One model of each kind, and both of those whose parameters the models spell in different ways.
BOTH = ("default", "llama3, original outside", "yarn, mscale of both")
BY_TURNS = [(kind, list(MODELS)[i % 2]) for i, kind in enumerate(KINDS)]
OTHERS = [(kind, name) for kind in BOTH for name in MODELS if (kind, name) not in BY_TURNS]


@pytest.mark.parametrize(("kind", "name"), BY_TURNS + OTHERS)
def test_logits(folders, kind, name, assert_close):
    folder = folders[name]
    use(folder, kind, "old" if name == "llama" else "new")
    with open_checkpoint(folder) as checkpoint:
        reference = Reference(checkpoint)
        with Engine(checkpoint, ranks=2, blocks=1, context=48) as engine:
            for ids, wanted in zip(PROMPTS, by_transformers(name, folder, PROMPTS), strict=True):
                assert_close(reference.logits(ids), wanted, 1e-4)
                assert_close(engine.logits(ids), wanted, 1e-4)


def test_logits_of_the_monokernel(folders, assert_close):
    folder = folders["qwen3"]
    use(folder, "longrope", "new")
    prompts = [IDS[:12], IDS[:24]]
    with Engine(folder, "sim", context=32) as engine:
        for ids, wanted in zip(prompts, by_transformers("qwen3", folder, prompts), strict=True):
            assert_close(engine.logits(ids), wanted, 2e-2)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_an_answer_is_the_forward_over_prompt_and_answer(folders, kind):
    folder = folders["llama"]
    use(folder, kind, "old")
    num = 14
    with Engine(folder, ranks=1, blocks=1, context=64) as engine:
        for start in (4, 12):
            prompt = IDS[:start]
            answer = engine.generate(prompt, max_tokens=num).ids
            (logits,) = by_transformers("llama", folder, [[*prompt, *answer]])
            assert answer == logits[start - 1 : -1].argmax(-1).tolist()


def test_the_kinds_differ(folders):
    """Otherwise the agreement above would say nothing."""
    found = {}
    for kind in KINDS:
        use(folders["llama"], kind, "old")
        with open_checkpoint(folders["llama"]) as checkpoint:
            found[kind] = Reference(checkpoint).logits(IDS[:48])
    # What is not given has the value that another one gives, and mscale alone is not used.
    alike = {"yarn, no factor": "yarn", "yarn, mscale": "yarn"}
    for kind, logits in found.items():
        for other in found.keys() - {kind}:
            difference = np.abs(logits - found[other]).max()
            is_alike = alike.get(kind, kind) == alike.get(other, other)
            assert difference < 1e-6 if is_alike else difference > 1e-2
