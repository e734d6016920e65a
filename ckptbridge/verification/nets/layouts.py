"""How a decoder's weights are stored in a checkpoint of a target.

This is written from the networks that read these checkpoints (transformers and the code published
beside the weights for ``hf``; MindFormers' network classes for ``mindformers`` and
``mindformers-legacy``), and deliberately not from the mapping tables: a forward judges a table only
if it does not come from it. The names themselves stand in :mod:`.stored_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ckptbridge.errors import UnsupportedError, UsageError
from ckptbridge.verification.nets.layout import Layout
from ckptbridge.verification.nets.spec import DecoderSpec
from ckptbridge.verification.nets.stored_names import (
    HF,
    LEGACY,
    LEGACY_FUSED,
    LEGACY_GLM,
    LEGACY_GLM_FAMILIES,
    LEGACY_GLM_SPLIT,
    LEGACY_GPT2,
    LEGACY_INTERNLM2_FUSED,
    LEGACY_LLAMA_FAMILIES,
    MINDFORMERS,
)

# What the layout options of a target may be, the default first. Families may know fewer.
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hf": {},
    "flat": {},
    "nn": {},
    "mindformers": {
        "attention": ("interleaved", "contiguous"),
        "mlp": ("interleaved", "contiguous"),
        "experts": ("2d", "3d"),
        "mla": ("separate", "fused"),
    },
    "mindformers-legacy": {"qkv": ("split", "fused"), "rope": ("pairs", "halves")},
}


def decoder_layout(spec: DecoderSpec, target: str, options: Mapping[str, str], names: Collection[str]) -> Layout:
    """How a checkpoint of ``spec`` for ``target`` is stored; ``names`` (what it holds) decide the root alone.

    ``options`` are the layout options that the checkpoint was written with. Raises UsageError for an
    unknown target or option value, UnsupportedError for a pair of family and target without a network.
    """
    if target not in OPTIONS:
        raise UsageError(
            f"There is no built-in MindSpore network for a {spec.family} checkpoint in the layout '{target}'.",
            remedy="Give --level weights, or a network of your own with --ms-net MODULE:FUNCTION; "
            f"built in are: {', '.join(OPTIONS)}.",
        )
    for key, value in options.items():
        if value not in OPTIONS[target].get(key, ()):
            raise UsageError(
                f"The layout option {key}={value} of '{target}' is unknown to its network.",
                remedy=f"Known are: {_listed(OPTIONS[target])}.",
            )
    layout = _LAYOUTS[target](spec, options)
    if layout is None:
        raise UnsupportedError(
            f"There is no built-in '{target}' network for the family '{spec.family}'.",
            remedy="Give --level weights, or a network of your own with --ms-net MODULE:FUNCTION.",
        )
    for root in layout.roots:
        if layout.with_root(root).embedding in names:
            return layout.with_root(root)
    return layout.with_root(layout.roots[0])


def _hf(spec: DecoderSpec, options: Mapping[str, str]) -> Layout:
    return HF[spec.family]


def _flat(spec: DecoderSpec, options: Mapping[str, str]) -> Layout:
    """``hf`` with the attention projections directly on the layer, nothing fused and nothing transposed."""
    layout = HF["llama" if spec.family == "internlm2" else spec.family]
    layout = replace(
        layout.renamed(lambda name: name.removeprefix("self_attn.")),
        qkv=("q_proj", "k_proj", "v_proj"),
        qkv_order="separate",
        out="o_proj",
        transposed=frozenset(),
    )
    if layout.gate_up_order == "halves":
        layout = replace(layout, gate_up=("gate_proj", "up_proj"), gate_up_order="separate", down="down_proj")
    return layout


def _nn(spec: DecoderSpec, options: Mapping[str, str]) -> Layout | None:
    """mindspore.nn's own names, for the families with LayerNorm; its Dense is (out, in)."""
    if spec.norm != "layer":
        return None
    layout = HF[spec.family]
    return replace(
        layout,
        embedding=_table(layout.embedding),
        positions=_table(layout.positions),
        norm_parts=("gamma", "beta"),
        transposed=frozenset(),
    )


def _table(name: str) -> str:
    return name.removesuffix("weight") + "embedding_table" if name else ""


def _legacy(spec: DecoderSpec, options: Mapping[str, str]) -> Layout | None:
    """MindFormers' older networks: Llama's, GLM's, InternLM2's and GPT-2's."""
    # GLM's network has qkv_concat by default, the others not.
    fused = options.get("qkv", "fused" if spec.family in LEGACY_GLM_FAMILIES else "split") == "fused"
    if spec.family in LEGACY_GLM_FAMILIES:
        # use_rearrange_rope: the network turns halves, on weights that were put in that order.
        return replace(LEGACY_GLM if fused else LEGACY_GLM_SPLIT, halved_heads=options.get("rope") == "halves")
    if options.get("rope") == "halves":
        return None
    if spec.family == "internlm2" and fused:
        return LEGACY_INTERNLM2_FUSED
    if spec.family == "gpt2":
        return LEGACY_GPT2
    if spec.family not in LEGACY_LLAMA_FAMILIES:
        return None
    return LEGACY_FUSED if fused else LEGACY


def _mindformers(spec: DecoderSpec, options: Mapping[str, str]) -> Layout:
    layout = replace(MINDFORMERS, experts_order="3d" if options.get("experts") == "3d" else "2d")
    if spec.norm == "layer":
        layout = replace(layout, norm_parts=("gamma", "beta"), positions="embedding.position_embeddings.weight")
    if options.get("attention") == "contiguous":
        layout = replace(layout, qkv_order="contiguous")
    if options.get("mlp") == "contiguous":
        layout = replace(layout, gate_up_order="halves")
    if options.get("mla") == "fused":
        layout = replace(
            layout,
            latent_order="fused",
            latent_down="self_attention.linear_qkv",
            q_up="self_attention.linear_qb",
            kv_up="self_attention.linear_kvb",
            kv_down_norm="self_attention.k_layernorm",
        )
    return layout


def _listed(options: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{key}={'|'.join(values)}" for key, values in options.items()) or "none"


_LAYOUTS: Mapping[str, Callable[[DecoderSpec, Mapping[str, str]], Layout | None]] = {
    "hf": _hf,
    "flat": _flat,
    "nn": _nn,
    "mindformers": _mindformers,
    "mindformers-legacy": _legacy,
}
