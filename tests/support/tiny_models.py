"""Tiny checkpoints of every kind, written for tests, and the files around them."""

import json
import math

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 8,
    "tie_word_embeddings": True,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LANEFORMER = {
    "architectures": ["LaneformerForCausalLM"],
    "model_type": "laneformer",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 304,
    "max_position_embeddings": 64,
    "num_lanes": 4,
    "sliding_window": 8,
    "swa_layers": 2,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def random_tensors(shapes, dtype=ml_dtypes.bfloat16, seed=0):
    """Random weights by name."""
    noise = np.random.default_rng(seed)
    return {
        name: noise.standard_normal(shape, dtype=np.float32).astype(dtype)
        for name, shape in shapes.items()
    }


def ordinary_shapes(config):
    """Names and shapes of a Llama or Qwen3 in Hugging Face's layout, from its config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    ffn, vocab = config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (queries, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, queries),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        if config["model_type"] == "qwen2":
            rows = {"q": queries, "k": keys, "v": keys}
            shapes |= {f"{at}.self_attn.{name}_proj.bias": (num,) for name, num in rows.items()}
    return shapes


def laneformer_shapes(config):
    """As ordinary_shapes(), for a Laneformer: the lane first."""
    lanes, hidden, vocab = config["num_lanes"], config["hidden_size"], config["vocab_size"]
    head_dim = hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] // lanes * head_dim
    keys = config["num_key_value_heads"] // lanes * head_dim
    ffn = config["intermediate_size"] // lanes
    is_cut = config.get("lm_head_type") == "vocab_parallel"
    shapes = {
        "model.tok_embeddings.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (lanes, vocab // lanes, hidden) if is_cut else (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.attention.wq.weight": (lanes, queries, hidden),
            f"{at}.attention.wk.weight": (lanes, keys, hidden),
            f"{at}.attention.wv.weight": (lanes, keys, hidden),
            f"{at}.attention.wo.weight": (lanes, hidden, queries),
            f"{at}.feed_forward.w1.weight": (lanes, ffn, hidden),
            f"{at}.feed_forward.w3.weight": (lanes, ffn, hidden),
            f"{at}.feed_forward.w2.weight": (lanes, hidden, ffn),
            f"{at}.attention_norm.weight": (hidden,),
            f"{at}.ffn_norm.weight": (hidden,),
        }
    return shapes


def shapes_of(config):
    is_laneformer = config["model_type"].startswith("laneformer")
    return laneformer_shapes(config) if is_laneformer else ordinary_shapes(config)


def write_folder(folder, config, tensors=None, *, with_tokenizer=False):
    """Writes config.json and model.safetensors; returns the tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(shapes_of(config)) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors")
    if with_tokenizer:
        write_tokenizer(folder)
    return tensors


def byte_vocabulary():
    """Tokens and merges of a byte-level BPE: three control tokens, all bytes, a few words."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (letters[32], "w")]
    control = ["<s>", "</s>", "<pad>"]
    tokens = [*control, *letters.values(), *(left + right for left, right in merges)]
    return tokens, merges


def write_tokenizer(folder):
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens, merges = byte_vocabulary()
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens([AddedToken(t, special=True) for t in tokens[:3]])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def write_gguf(path, *, family="llama", tensors=None, change=None, split=0, **shape):
    """Writes a GGUF file with FP32 tensors and a tokenizer; returns the tensors.

    Args:
        tensors: Replaces tensors: name -> array, or (raw bytes, quantisation); None leaves it out.
        change: Called with the writer, before it writes.
        split: Most tensors in a file; 0: one file. Otherwise NAME-00001-of-0000N.gguf and so on.
        shape: Replaces hidden, ffn, heads, kv_heads, head_dim, layers or vocab.
    """
    sizes = {"hidden": 16, "ffn": 24, "heads": 4, "kv_heads": 2, "head_dim": 4, "layers": 2}
    sizes |= {"vocab": 300} | shape
    writer = gguf.GGUFWriter(path, family, split_max_tensors=split)
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["ffn"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, merges = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if change is not None:
        change(writer)
    written = random_tensors(gguf_shapes(sizes, family), np.float32) | (tensors or {})
    for name, value in written.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def gguf_shapes(sizes, family):
    hidden, ffn, vocab, head_dim = (sizes[name] for name in ("hidden", "ffn", "vocab", "head_dim"))
    queries, keys = sizes["heads"] * head_dim, sizes["kv_heads"] * head_dim
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    for layer in range(sizes["layers"]):
        at = f"blk.{layer}"
        shapes |= {
            f"{at}.attn_q.weight": (queries, hidden),
            f"{at}.attn_k.weight": (keys, hidden),
            f"{at}.attn_v.weight": (keys, hidden),
            f"{at}.attn_output.weight": (hidden, queries),
            f"{at}.ffn_gate.weight": (ffn, hidden),
            f"{at}.ffn_up.weight": (ffn, hidden),
            f"{at}.ffn_down.weight": (hidden, ffn),
            f"{at}.attn_norm.weight": (hidden,),
            f"{at}.ffn_norm.weight": (hidden,),
        }
        if family == "qwen3":
            shapes |= {f"{at}.attn_{name}_norm.weight": (head_dim,) for name in "qk"}
        if family == "qwen2":
            rows = {"q": queries, "k": keys, "v": keys}
            shapes |= {f"{at}.attn_{name}.bias": (num,) for name, num in rows.items()}
    return shapes


def count(shapes):
    """Elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())
