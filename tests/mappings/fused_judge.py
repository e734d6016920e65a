"""Judges the tables of the families that fuse, as table_judge.py does those of the other families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from published_fused import TINY, Config, Shapes, roots, shapes, tiny_config
from table_judge import numbered, translate
from written_fused import expected, layers

from ckptbridge.tables.expand import Expansion, choose_roots, expand
from ckptbridge.tables.proof import prove
from ckptbridge.tables.table import Table

FAMILIES = (
    *("internlm2", "baichuan", "phi3", "gpt_neox", "chatglm", "gpt2"),
    *("glm4", "glm4_moe", "deepseek_v4"),
)
# Networks that cannot hold what these models have: a bias, or a head of its own.
UNFIT = {("internlm2", "mindformers-legacy", "biased"), ("gpt2", "mindformers-legacy", "untied")}


def cases(table: Table) -> Iterator[tuple[Config, Shapes, str]]:
    """Small models for a table: config, shapes by PyTorch name (without tied copies), and the prefix."""
    for family, variant in TINY:
        if family == table.family and (family, table.target, variant) not in UNFIT:
            c = tiny_config(family, variant)
            for root in roots(family, variant):
                yield c, shapes(c, root), root


def faults(table: Table, c: Config, shapes: Shapes, root: str, options: Mapping[str, str]) -> list[str]:
    """What is wrong with the table for this model and layout; empty when it is right."""
    pt = numbered(shapes)
    expansion = expand(table, c, options, choose_roots(table, "pt", pt.keys()))
    prove(expansion)
    try:
        got = translate(expansion, pt)
    except KeyError as error:
        return [f"the table wants {error}, which the model has not"]
    want = expected(table.family, table.target, c, options, pt, root)
    found = [f"{name} is missing on the MindSpore side" for name in want.keys() - got.keys()]
    found += [f"{name} should not be on the MindSpore side" for name in got.keys() - want.keys()]
    for name in want.keys() & got.keys():
        if want[name].shape != got[name].shape:
            found.append(f"{name} has the shape {got[name].shape}, not {want[name].shape}")
        elif not np.array_equal(want[name], got[name]):
            found.append(f"{name} has other contents")
    if not found:
        again = translate(expansion, got, back=True)
        found += [f"{n} does not come back" for n in pt.keys() | again.keys() if n not in pt or n not in again]
        found += [f"{n} comes back changed" for n in pt.keys() & again.keys() if not np.array_equal(pt[n], again[n])]
    return found + _side_faults(table, expansion, c, pt.keys(), root)


def _side_faults(table: Table, expansion: Expansion, c: Config, names: object, root: str) -> list[str]:
    """What is tied, dropped, and kept in its own type, against what is written out here."""
    tied = {entry.pt[0]: _tied_to(entry) for entry in expansion.entries if entry.kind == "tied"}
    found = [] if tied == tied_copies(table, c, root) else [f"tied: {tied}, not {tied_copies(table, c, root)}"]
    dropped = {name for entry in expansion.entries if entry.kind == "drop" for name in (*entry.pt, *entry.ms)}
    if dropped != buffers(c, root):
        found.append(f"dropped: {sorted(dropped ^ buffers(c, root))} differ")
    dtypes = {
        e.pt[0]: (e.dtype_pt, e.dtype_ms) for e in expansion.entries if e.kind == "map" and (e.dtype_pt or e.dtype_ms)
    }
    want = {name: _own_type(table, name) for name in expansion.by_pt if _own_type(table, name)}
    if dtypes != want:
        found.append(f"types of their own: {dtypes.items() ^ want.items()} differ")
    if any(entry.optional for entry in expansion.entries):
        found.append("something is optional")
    return found


def _tied_to(entry: object) -> str:
    return str(entry.tied_pt)  # type: ignore[attr-defined]


def tied_copies(table: Table, c: Config, root: str) -> dict[str, str]:
    """The names of tied copies, and the tensors that they copy, by hand."""
    family = table.family
    tied = c.get("tie_word_embeddings", family == "gpt2")
    if family == "gpt2":
        legacy = table.target == "mindformers-legacy"
        return {"lm_head.weight": f"{root}wte.weight"} if tied or legacy else {}
    if family == "chatglm":
        return {f"{root}output_layer.weight": f"{root}embedding.word_embeddings.weight"} if tied else {}
    if family == "deepseek_v4":
        return {"head.weight": "embed.weight"} if tied else {}
    if not root:
        return {}
    head = {"internlm2": "output", "gpt_neox": "embed_out"}.get(family, "lm_head") + ".weight"
    embed = root + {"internlm2": "tok_embeddings", "gpt_neox": "embed_in"}.get(family, "embed_tokens") + ".weight"
    copies = {head: embed} if tied else {}
    if family == "glm4_moe":
        for i in range(c["num_hidden_layers"], layers(c)):
            copies[f"{root}layers.{i}.embed_tokens.weight"] = embed
            copies[f"{root}layers.{i}.shared_head.head.weight"] = embed if tied else head
    return copies


def buffers(c: Config, root: str) -> set[str]:
    """What is dropped: buffers that old checkpoints carry."""
    each = range(layers(c))
    match c["model_type"]:
        case "gpt2":
            return {f"{root}h.{i}.attn.{name}" for i in each for name in ("bias", "masked_bias")}
        case "gpt_neox":
            names = ("bias", "masked_bias", "rotary_emb.inv_freq")
            return {f"{root}layers.{i}.attention.{name}" for i in each for name in names}
        case "chatglm":
            return {f"{root}rotary_pos_emb.inv_freq"}
        case "internlm2":
            return {f"{root}layers.{i}.attention.rotary_emb.inv_freq" for i in each}
        case "deepseek_v4":
            return set()
    return {f"{root}layers.{i}.self_attn.rotary_emb.inv_freq" for i in each} | {f"{root}rotary_emb.inv_freq"}


def _own_type(table: Table, name: str) -> tuple[str, str] | None:
    """Router biases and, in DeepSeek-V4, what is computed in float32 whatever the model is; token tables."""
    last = name.rpartition(".")[2]
    if table.family == "deepseek_v4":
        if last == "tid2eid":
            return ("int64", "int32") if table.target == "mindformers" else ("keep", "keep")
        if last in ("attn_sink", "ape") or "hc_" in name or name.endswith("ffn.gate.bias"):
            return ("keep", "keep")
    return ("keep", "keep") if last == "e_score_correction_bias" else None
