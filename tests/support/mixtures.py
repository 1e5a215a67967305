"""Tiny mixtures of experts for tests, in folders of Hugging Face's layout and in GGUF files."""

import gguf
import ml_dtypes
import numpy as np
from tiny_models import LLAMA, ordinary_shapes, random_tensors, write_gguf

from kccl.engine.formats.mxfp4 import MXFP4

QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 8,
    "num_local_experts": 5,
    "experts_per_token": 2,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"original_max_position_embeddings": 4096, "truncate": False},
    },
}
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def tensors_of(config, seed=0):
    """Random weights in BF16, of sizes that keep logits near 1."""
    shapes = {n: s for n, s in ordinary_shapes(config).items() if ".mlp." not in n}
    hidden, num = config["hidden_size"], config.get("num_experts") or config["num_local_experts"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        if config["model_type"] == "qwen3_moe":
            ffn, norm = config["moe_intermediate_size"], (config["head_dim"],)
            shapes |= {f"{at}.self_attn.{name}_norm.weight": norm for name in "qk"}
            shapes[f"{at}.mlp.gate.weight"] = num, hidden
            for expert in range(num):
                of_expert = f"{at}.mlp.experts.{expert}"
                shapes |= {f"{of_expert}.{n}_proj.weight": (ffn, hidden) for n in ("gate", "up")}
                shapes[f"{of_expert}.down_proj.weight"] = hidden, ffn
            continue
        ffn, d = config["intermediate_size"], config["head_dim"]
        rows = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d, "o": hidden}
        shapes |= {f"{at}.self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
        shapes |= {
            f"{at}.self_attn.sinks": (heads,),
            f"{at}.mlp.router.weight": (num, hidden),
            f"{at}.mlp.router.bias": (num,),
            f"{at}.mlp.experts.gate_up_proj": (num, hidden, 2 * ffn),
            f"{at}.mlp.experts.gate_up_proj_bias": (num, 2 * ffn),
            f"{at}.mlp.experts.down_proj": (num, ffn, hidden),
            f"{at}.mlp.experts.down_proj_bias": (num, hidden),
        }
    drawn = random_tensors(shapes, np.float32, seed)
    return {
        name: (each if each.ndim == 1 else each * each.shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)
        for name, each in drawn.items()
    }


def in_blocks(tensors):
    """gpt-oss's tensors with the experts' matrices in MXFP4, and the same as BF16 exactly."""
    blocks, exact = {}, {}
    for name, each in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            blocks[name] = exact[name] = each
            continue
        # A row of blocks has the columns of a product.
        rows = np.ascontiguousarray(each.swapaxes(1, 2), np.float32)
        words = MXFP4.from_values(rows)
        groups = words.reshape(*rows.shape[:2], -1, MXFP4.words)
        nibbles = np.concatenate([groups[..., 1:] & 15, groups[..., 1:] >> 4], axis=-1)
        blocks[f"{name}_blocks"] = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        blocks[f"{name}_scales"] = np.ascontiguousarray(groups[..., 0])
        numbers = MXFP4.to_float32(words).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
        exact[name] = np.ascontiguousarray(numbers)
    return blocks, exact


def write_mixture(path, config, tensors, *, change=None, **replaced):
    """Writes a GGUF file with the tensors of a folder.

    Args:
        change: Called with the writer, before it writes.
        replaced: Replaces tensors of the file, as write_gguf() does.
    """
    is_qwen3 = config["model_type"] == "qwen3_moe"
    family = "qwen3moe" if is_qwen3 else "gpt-oss"
    num = config.get("num_experts") or config["num_local_experts"]
    ffn = config["moe_intermediate_size"] if is_qwen3 else config["intermediate_size"]

    def add_keys(writer):
        writer.add_expert_count(num)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(ffn)
        if not is_qwen3:
            writer.add_sliding_window(config["sliding_window"])
            writer.add_rope_freq_base(config["rope_theta"])
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
            writer.add_rope_scaling_orig_ctx_len(4096)
        if change is not None:
            change(writer)

    wide = {name: np.asarray(each, np.float32) for name, each in tensors.items()}
    named = {
        "token_embd.weight": wide["model.embed_tokens.weight"],
        "output_norm.weight": wide["model.norm.weight"],
        "output.weight": wide["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        of_hf, at = f"model.layers.{layer}", f"blk.{layer}"
        dense = dict.fromkeys(f"{at}.ffn_{each}.weight" for each in ("gate", "up", "down"))
        # They stand where they would be written.
        named |= dense | {f"{at}.ffn_norm.weight": None}
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
            for kind in ("weight", "bias"):
                name = f"{of_hf}.self_attn.{ours}_proj.{kind}"
                if name in wide:
                    named[f"{at}.attn_{theirs}.{kind}"] = wide[name]
        named[f"{at}.attn_norm.weight"] = wide[f"{of_hf}.input_layernorm.weight"]
        behind = wide[f"{of_hf}.post_attention_layernorm.weight"]
        mlp = f"{of_hf}.mlp"
        if is_qwen3:
            named[f"{at}.ffn_norm.weight"] = behind
            named |= {
                f"{at}.attn_{n}_norm.weight": wide[f"{of_hf}.self_attn.{n}_norm.weight"]
                for n in "qk"
            }
            named[f"{at}.ffn_gate_inp.weight"] = wide[f"{mlp}.gate.weight"]
            for each in ("gate", "up", "down"):
                of_experts = [wide[f"{mlp}.experts.{e}.{each}_proj.weight"] for e in range(num)]
                named[f"{at}.ffn_{each}_exps.weight"] = np.stack(of_experts)
            continue
        named[f"{at}.post_attention_norm.weight"] = behind
        named[f"{at}.attn_sinks.weight"] = wide[f"{of_hf}.self_attn.sinks"]
        for kind in ("weight", "bias"):
            named[f"{at}.ffn_gate_inp.{kind}"] = wide[f"{mlp}.router.{kind}"]
        both, down = wide[f"{mlp}.experts.gate_up_proj"], wide[f"{mlp}.experts.down_proj"]
        named[f"{at}.ffn_down_exps.weight"] = down.swapaxes(1, 2)
        named[f"{at}.ffn_down_exps.bias"] = wide[f"{mlp}.experts.down_proj_bias"]
        for offset, each in enumerate(("gate", "up")):
            named[f"{at}.ffn_{each}_exps.weight"] = both[:, :, offset::2].swapaxes(1, 2)
            of_bias = wide[f"{mlp}.experts.gate_up_proj_bias"][:, offset::2]
            named[f"{at}.ffn_{each}_exps.bias"] = of_bias
    given = {
        n: e if e is None or isinstance(e, tuple) else np.ascontiguousarray(e)
        for n, e in (named | replaced).items()
    }
    sizes = {"hidden": config["hidden_size"], "head_dim": config["head_dim"]}
    write_gguf(path, family=family, change=add_keys, tensors=given, **sizes)
    return given
