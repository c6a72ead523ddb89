"""Models of `transformers` with random weights, and their folders: what imports and exports are
compared with."""

import json
from pathlib import Path

import tokenizers
import torch

from interop.huggingface.read import read_huggingface
from interop.huggingface.tokenizer_files import make_json, tokenizer_files
from model import GPT
from nanodnt.data.tokenizer import Tokenizer, json_meta
from nanodnt.weights import load_weights

# a tokenizer for the models below
CHARS = Tokenizer.meta_for("chars", [chr(ord("A") + i) for i in range(50)])

SIZES = dict(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    max_position_embeddings=32,
)
SIZES |= dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-2,
    bos_token_id=None,
    eos_token_id=None,
)
GPT2_SIZES = dict(
    vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=4, layer_norm_epsilon=1e-2
)
GPT2_SIZES |= dict(
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None
)
FULL = dict(layer_types=["full_attention"] * 2, pad_token_id=None)
EXPERTS = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=8)

# name: (their class, their settings), one of every part that we can take.
PEERS = {
    "GPT-2": ("GPT2", dict()),
    "GPT-2, relu, n_inner, untied": (
        "GPT2",
        dict(activation_function="relu", n_inner=24, tie_word_embeddings=False),
    ),
    "LLaMA": ("Llama", dict(tie_word_embeddings=False)),
    "SmolLM": (
        "Llama",
        dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e5)),
    ),
    "LLaMA, biases, heads": (
        "Llama",
        dict(attention_bias=True, mlp_bias=True, head_dim=6, num_key_value_heads=4),
    ),
    "Qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("Qwen3", dict(head_dim=6, tie_word_embeddings=True)),
    "Qwen3, untied": ("Qwen3", dict(head_dim=4, tie_word_embeddings=False, num_key_value_heads=1)),
    "OLMo-2": ("Olmo2", dict(head_dim=6, tie_word_embeddings=False)),
    "Gemma 3": ("Gemma3", dict(FULL, head_dim=6, query_pre_attn_scalar=6)),
    "Mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "Mixtral, heads, one expert": (
        "Mixtral",
        dict(num_local_experts=3, num_experts_per_tok=1, head_dim=6),
    ),
    "Qwen3-MoE": ("Qwen3Moe", dict(EXPERTS, head_dim=6, norm_topk_prob=True)),
    "Qwen3-MoE, raw weights, tied": (
        "Qwen3Moe",
        dict(EXPERTS, norm_topk_prob=False, tie_word_embeddings=True),
    ),
}


@torch.no_grad()
def make_peer(name: str, seed: int = 3, **changes):
    """A model of `transformers` with random weights: no gain is 1 and no bias 0, so that an ignored
    one shows."""
    import transformers

    kind, settings = PEERS[name]
    sizes = GPT2_SIZES if kind == "GPT2" else SIZES
    config_class = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    config = getattr(transformers, config_class)(**sizes | settings | changes)
    architecture = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    peer = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    for key, p in peer.named_parameters():
        is_gain = p.ndim == 1 and key.endswith("weight")
        noise = torch.empty(p.shape).normal_(generator=generator)
        p.copy_(1 + 0.3 * noise if is_gain else 0.3 * noise)
    return peer.eval()


def chatml_tokenizer(base: str = "bytes", *added, bos=None) -> dict:
    """The tokenizer `base`, then <|im_start|> and, as the end of text, <|im_end|>, then the tokens
    `added`."""
    made = tokenizers.Tokenizer.from_str(make_json(Tokenizer.meta_for(base)))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(list(added))
    return json_meta(made.to_str(), "<|im_end|>", bos)


def read_model(folder, **changes) -> GPT:
    """The model in a folder of Hugging Face, as we read it."""
    pretrained = read_huggingface(str(folder), **changes)
    model = GPT.empty(pretrained.config).to_empty(device="cpu")
    load_weights(model, pretrained.weights)
    return model.eval()


def save_tokenizer(meta: dict, folder: Path, block_size: int = 32) -> None:
    """The files of a tokenizer in a folder."""
    for name, text in tokenizer_files(meta, block_size).items():
        (folder / name).write_text(text, encoding="utf-8")


def edit_config(folder: Path, **changes) -> None:
    """Change keys of a folder's config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
