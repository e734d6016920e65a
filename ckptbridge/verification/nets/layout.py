"""How a decoder's weights are named and stored, as data for the readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and storage orders of one decoder's weights.

    Names are without ``.weight`` and ``.bias``, but for those of the two embeddings and the router's
    bias. Names from ``input_norm`` on follow ``layer``. ``qkv`` are three names, or one whose rows are
    [all q; all k; all v] ("contiguous") or, for each key/value group, [its q heads; k; v]
    ("grouped"). ``gate_up`` are two names, or one with rows [gate; up] ("halves") or gate and up in
    turn ("rows"); a plain MLP has one name. The weights of the parts in ``transposed`` ("qkv", "out",
    "mlp") are (in, out). ``norm_parts`` are the last components of a block's and the final norm.
    """

    embedding: str = "{root}embed_tokens.weight"
    final_norm: str = "{root}norm"
    head: str = "lm_head"
    positions: str = ""
    roots: tuple[str, ...] = ("model.", "")
    layer: str = "{root}layers.{i}."
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = "post_self_attn_layernorm"
    mlp_post_norm: str = "post_mlp_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_order: Literal["separate", "contiguous", "grouped"] = "separate"
    # The rows of each q and k head stand even ones first: a RoPE over pairs becomes one over halves.
    halved_heads: bool = False
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    # Latent attention. "fused": q_down (or q_direct) and kv_down are the rows of one weight, latent_down.
    latent_order: Literal["separate", "fused"] = "separate"
    q_direct: str = "self_attn.q_proj"
    q_down: str = "self_attn.q_a_proj"
    q_down_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_down_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    latent_down: str = ""
    mlp: str = "mlp."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gate_up_order: Literal["separate", "halves", "rows", "plain"] = "separate"
    down: str = "down_proj"
    transposed: frozenset[str] = frozenset()
    norm_parts: tuple[str, str] = ("weight", "bias")
    # "2d", "3d": stacked as experts.weight1 and experts.weight2, each expert transposed.
    experts_order: Literal["separate", "2d", "3d"] = "separate"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{e}."
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    experts: str = "mlp.experts."
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"

    def with_root(self, root: str) -> Layout:
        """The layout with every ``{root}`` filled in."""
        return self.renamed(lambda name: name.replace("{root}", root))

    def renamed(self, change: Callable[[str], str]) -> Layout:
        """The layout with ``change`` made to every name; the orders hold no part of any name."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for key, value in values.items():
            if key in ("roots", "norm_parts"):
                continue
            if isinstance(value, str):
                values[key] = change(value)
            elif isinstance(value, tuple):
                values[key] = tuple(change(part) for part in value)
        return Layout(**values)
