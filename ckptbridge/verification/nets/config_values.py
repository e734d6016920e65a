"""Values out of a ``config.json``, with the families' different spellings and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from ckptbridge.errors import ConfigError, UnsupportedError
from ckptbridge.verification.nets.spec import GroupedAttention, Rope

Config = Mapping[str, Any]


def need(config: Config, *keys: str) -> Any:
    """The first of ``keys`` that the config holds (families spell the same value differently)."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ConfigError(
        f"The config has no '{keys[0]}', which the forward of model type '{config.get('model_type')}' needs.",
        remedy="Give the config.json that belongs to the weights with --config.",
    )


def value_or(config: Config, key: str, default: Any) -> Any:
    """``config[key]``, or the default of the family's config class when it is absent or null."""
    value = config.get(key)
    return default if value is None else value


def head_kind(config: Config, tied: bool = False) -> Literal["own", "tied", "none"]:
    """Whether the model ends in a head; ``tied`` is what the family assumes without ``tie_word_embeddings``."""
    architectures = config.get("architectures") or []
    if architectures and str(architectures[0]).endswith("Model") and not str(architectures[0]).endswith("LMHeadModel"):
        return "none"
    return "tied" if value_or(config, "tie_word_embeddings", tied) else "own"


def grouped_attention(config: Config, bias: bool, out_bias: bool, norm: bool = False, dim: int = 0) -> GroupedAttention:
    heads = int(need(config, "num_attention_heads"))
    groups = int(value_or(config, "num_key_value_heads", heads))
    dim = int(value_or(config, "head_dim", dim or int(need(config, "hidden_size")) // heads))
    if groups < 1 or heads % groups:
        raise ConfigError(f"{heads} attention heads cannot share {groups} key/value heads evenly.")
    return GroupedAttention(heads, groups, dim, bias, out_bias, norm, scale=dim**-0.5)


def rope_of(config: Config, head_dim: int, *, pairs: bool = False, theta: float = 10000.0, part: float = 1.0) -> Rope:
    """RoPE from ``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta`` beside it."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        kind = "longrope"  # Phi-3's older names for it
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn", "longrope"):
        raise UnsupportedError(
            f"There is no built-in forward for RoPE of type '{kind}'.",
            remedy="Give your own network with --ms-net MODULE:FUNCTION.",
        )
    theta = float(given.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or theta)
    part = float(
        given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or config.get("rotary_pct") or part
    )
    longest = int(value_or(config, "max_position_embeddings", 0))
    scaling = {k: float(v) for k, v in given.items() if isinstance(v, (int, float)) and k != "rope_theta"}
    if kind in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = float(
            original or scaling.get("original_max_position_embeddings") or longest
        )
    if kind != "default" and "factor" not in scaling:
        if kind not in ("yarn", "longrope"):
            raise ConfigError(f"The config's RoPE of type '{kind}' has no 'factor'.")
        scaling["factor"] = longest / scaling["original_max_position_embeddings"]
    factors = (tuple(given.get("short_factor") or ()), tuple(given.get("long_factor") or ()))
    known = cast('Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]', kind)
    return Rope(int(head_dim * part), theta, known, pairs, longest, scaling, factors)


def one_window(config: Config, layers: int) -> tuple[int | None, ...]:
    """One window for all layers: Mistral, Mixtral, Phi-3 and Qwen3-MoE."""
    default = 4096 if config["model_type"] == "mistral" else None
    window = config.get("sliding_window", default)
    if config["model_type"] == "qwen3_moe" and not config.get("use_sliding_window"):
        window = None
    return (window,) * layers


def qwen_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: by ``layer_types``, else from ``max_window_layers`` on, and only if asked for."""
    window = value_or(config, "sliding_window", 4096) if config.get("use_sliding_window") else None
    first = int(value_or(config, "max_window_layers", 28))
    types = config.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise ConfigError(f"The config has {layers} layers and names the type of {len(types)}.")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if config["model_type"] == "qwen2_moe":
        return tuple(window if i % 2 == 0 and i < first else None for i in range(layers))
    return tuple(window if i >= first else None for i in range(layers))
