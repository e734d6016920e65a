"""How alike two tensor names are, once the words that conventions use for one thing are made one."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

# One line for one thing: components as torch.nn, mindspore.nn, transformers, MindFormers and Meta call it.
_SAME: tuple[tuple[str, ...], ...] = (
    ("weight", "gamma", "embedding_table", "embedding_weight"),
    ("bias", "beta"),
    ("running_mean", "moving_mean"),
    ("running_var", "moving_variance"),
    ("layers", "layer", "h", "blocks", "block"),
    ("attn", "self_attn", "attention", "self_attention"),
    ("mlp", "feed_forward", "ffn"),
    ("embed_tokens", "word_embeddings", "tok_embeddings", "wte", "embed"),
    ("q_proj", "wq", "linear_q", "query"),
    ("k_proj", "wk", "linear_k", "key"),
    ("v_proj", "wv", "linear_v", "value"),
    ("o_proj", "wo", "linear_proj", "out_proj"),
    ("gate_proj", "w1", "gating"),
    ("up_proj", "w3", "hidden"),
    ("down_proj", "w2", "linear_fc2"),
    ("qkv_proj", "linear_qkv", "w_qkv", "wqkv", "W_pack", "query_key_value", "c_attn"),
    ("gate_up_proj", "linear_fc1", "w_gate_hidden"),
    ("input_layernorm", "attention_norm", "attn_norm", "ln_1"),
    ("post_attention_layernorm", "ffn_norm", "pre_mlp_layernorm", "ln_2"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("gate", "router"),
    ("norm", "norm_out", "final_layernorm", "ln_f"),
    ("lm_head", "output_layer", "output", "head"),
)
_CANONICAL = {word.lower(): words[0] for words in _SAME for word in words}

# What only says that there is a model.
_EMPTY = ("model", "decoder", "transformer", "module", "network", "backbone", "embedding")

# The order in which parts are joined wherever nothing says otherwise.
_ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@lru_cache(maxsize=65536)
def canonical(template: tuple[str | None, ...]) -> tuple[str, ...]:
    """The words of a name, synonyms made one, numbers as ``*``."""
    parts = ["*" if part is None else _CANONICAL.get(part.lower(), part.lower()) for part in template]
    kept = [part for part in parts[:-1] if part not in _EMPTY] + parts[-1:]
    return tuple(word for part in kept for word in part.replace("_", " ").split())


def shared_words(a: tuple[str | None, ...], b: tuple[str | None, ...]) -> float:
    """From 0 to 1: how many of the words are in both, whatever their order. Quick, and enough to sort out most."""
    one, other = frozenset(canonical(a)), frozenset(canonical(b))
    return len(one & other) / len(one | other)


@lru_cache(maxsize=1 << 18)
def similarity(a: tuple[str | None, ...], b: tuple[str | None, ...]) -> float:
    """From 0 to 1; 1 only for equal names, just below for names that are equal word by word."""
    if a == b:
        return 1.0
    return 0.99 * SequenceMatcher(None, canonical(a), canonical(b), autojunk=False).ratio()


def part_order(template: Sequence[str | None]) -> int:
    """Where a part usually stands among those that it is joined with; equal where there is no custom."""
    known = [_CANONICAL.get((part or "").lower()) for part in template[-2:]]
    return next((_ORDER.index(word) for word in known if word in _ORDER), len(_ORDER))
