"""Judges a table: what it makes of a small model, against the layout written out by hand.

Every element of the model has a value of its own, so a name, a row or an operand in a wrong place
shows, also between tensors of equal shape. One judgement takes milliseconds: the mutation script passes
thousands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
from published_models import (
    TINY,
    Config,
    Shapes,
    decoder_shapes,
    encoder_shapes,
    extra_layers,
    head_shapes,
    tiny_config,
)
from written_layouts import Array, expected

from ckptbridge.tables.axes import BoundAxes
from ckptbridge.tables.expand import Entry, Expansion, choose_roots, expand
from ckptbridge.tables.proof import prove
from ckptbridge.tables.table import Table

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
    *("bert", "roberta"),
)
HEADS = {
    "bert": ("cls.predictions", "cls.seq_relationship", "classifier", "qa_outputs"),
    "roberta": ("lm_head", "qa_outputs"),
}


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Arrays in which every element of all of them together has a number of its own."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        arrays[name] = np.arange(start, start + prod(shape), dtype=np.int32).reshape(shape)
        start += prod(shape)
    return arrays


def carry(bound: BoundAxes, sources: list[Array], *, back: bool = False) -> list[Array]:
    """The tensors of the right side from those of the left, or the other way, block by block."""
    shapes = bound.left if back else bound.right
    targets = [np.full(shape, -1, dtype=np.int32) for shape in shapes]
    for block in bound.blocks:
        one, other = (block.right, block.left) if back else (block.left, block.right)
        source, target = sources[one.tensor], targets[other.tensor]
        _strided(target, other, block.sizes)[...] = _strided(source, one, block.sizes)
    return targets


def _strided(array: Array, view: Any, sizes: tuple[int, ...]) -> Array:
    strides = tuple(s // array.itemsize for s in array.strides)
    flat = np.ascontiguousarray(array).reshape(-1) if not array.flags.c_contiguous else array.reshape(-1)
    bytes_apart = tuple(s * array.itemsize for s in view.strides(strides))
    return np.lib.stride_tricks.as_strided(flat[view.offset(strides) :], sizes, bytes_apart)


def translate(expansion: Expansion, arrays: Mapping[str, Array], *, back: bool = False) -> dict[str, Array]:
    """One side of a whole model from the other, as the entries of kind ``map`` say. KeyError for what is missing."""
    found: dict[str, Array] = {}
    for entry in expansion.entries:
        names, targets = (entry.ms, entry.pt) if back else (entry.pt, entry.ms)
        if entry.kind != "map" or (entry.optional and not any(name in arrays for name in names)):
            continue
        sources = [arrays[name] for name in names]
        bound = entry.bind("ms" if back else "pt", [a.shape for a in sources])
        found |= zip(targets, carry(bound, sources, back=back), strict=True)
    return found


def layouts(table: Table) -> Iterator[dict[str, str]]:
    """Every combination of the table's layout options."""
    for values in itertools.product(*table.layout.values()):
        yield dict(zip(table.layout, values, strict=True))


def unfit(table: Table, variant: str) -> bool:
    """Whether MindFormers' networks have no place for the biases of this variant."""
    latent = table.family in ("deepseek_v2", "deepseek_v3")
    if table.target == "mindformers":
        return latent and variant in ("biased", "mtp biased")
    return (table.target, variant) == ("mindformers-legacy", "mlp-biased")


def cases(table: Table) -> Iterator[tuple[Config, Shapes, str]]:
    """Small models for a table: config, shapes by PyTorch name (without tied copies), and the prefix."""
    family = table.family
    for model_type, variant in TINY:
        if model_type != family or unfit(table, variant):
            continue
        c = tiny_config(model_type, variant)
        if family in HEADS:
            yield from _encoder_cases(family, c)
            continue
        shapes = decoder_shapes(c)
        for i in range(c["num_hidden_layers"], c["num_hidden_layers"] + extra_layers(c)):
            del shapes[f"model.layers.{i}.embed_tokens.weight"], shapes[f"model.layers.{i}.shared_head.head.weight"]
        yield c, shapes, "model."
        if variant == "plain":
            yield c, decoder_shapes(c, root=""), ""


def _encoder_cases(family: str, c: Config) -> Iterator[tuple[Config, Shapes, str]]:
    root = f"{family}."
    yield c, encoder_shapes(c), ""
    buffers = {
        f"{root}embeddings.position_ids": (1, c["max_position_embeddings"]),
        f"{root}embeddings.token_type_ids": (1, c["max_position_embeddings"]),
    }
    for names in (("weight", "bias"), ("gamma", "beta"))[: 2 if family == "bert" else 1]:
        shapes = encoder_shapes(c, root, pooler=False, names=names) | buffers
        for head in HEADS[family]:
            shapes |= head_shapes(c, head, names)
        yield c, shapes, root
    untied = c | {"tie_word_embeddings": False}
    first = HEADS[family][0]
    decoder = {
        f"{first}.decoder.weight": (c["vocab_size"], c["hidden_size"]),
        f"{first}.decoder.bias": (c["vocab_size"],),
    }
    yield untied, encoder_shapes(c, root) | head_shapes(c, first) | decoder, root
    if family == "roberta":
        yield c, encoder_shapes(c, root, pooler=False) | head_shapes(c, "classification head"), root
        yield c, encoder_shapes(c, root, pooler=False) | head_shapes(c, "classifier"), root


def tied_copies(family: str, c: Config, root: str) -> dict[str, str]:
    """The names of tied copies, and the tensors that they copy: as transformers shares them, by hand."""
    if family in HEADS:
        if not c["tie_word_embeddings"]:
            return {}
        head = HEADS[family][0]
        return {
            f"{head}.decoder.weight": f"{root}embeddings.word_embeddings.weight",
            f"{head}.decoder.bias": f"{head}.bias",
        }
    if not root:
        return {}
    copies = {"lm_head.weight": "model.embed_tokens.weight"} if c["tie_word_embeddings"] else {}
    for i in range(c["num_hidden_layers"], c["num_hidden_layers"] + extra_layers(c)):
        copies[f"model.layers.{i}.embed_tokens.weight"] = "model.embed_tokens.weight"
        head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        copies[f"model.layers.{i}.shared_head.head.weight"] = head
    return copies


def tied_on_mindspore(table: Table, copies: Mapping[str, str], root: str) -> dict[str, str]:
    """The same on the MindSpore side, for the copies that a network of the target may have."""
    if table.target in ("hf", "flat"):
        return dict(copies)
    if table.target == "nn":
        table_name = f"{root}embeddings.word_embeddings.embedding_table"
        return {name: table_name if name.endswith("weight") else source for name, source in copies.items()}
    if copies.get("lm_head.weight") is None:
        return {}
    if table.target == "mindformers":
        return {"output_layer.weight": "embedding.word_embeddings.weight"}
    return {"lm_head.weight": "model.tok_embeddings.embedding_weight"}


def faults(table: Table, c: Config, shapes: Shapes, root: str, options: Mapping[str, str]) -> list[str]:
    """What is wrong with the table for this model and layout; empty when it is right."""
    pt = numbered(shapes)
    roots = choose_roots(table, "pt", pt.keys())
    expansion = expand(table, c, options, roots)
    prove(expansion)
    try:
        got = translate(expansion, pt)
    except KeyError as error:
        return [f"the table wants {error}, which the model has not"]
    want = expected(table.target, c, options, pt, root)
    found = [f"{name} is missing on the MindSpore side" for name in want.keys() - got.keys()]
    found += [f"{name} should not be on the MindSpore side" for name in got.keys() - want.keys()]
    for name in want.keys() & got.keys():
        if want[name].shape != got[name].shape:
            found.append(f"{name} has the shape {got[name].shape}, not {want[name].shape}")
        elif not np.array_equal(want[name], got[name]):
            found.append(f"{name} has other contents")
    if not found:
        again = translate(expansion, got, back=True)
        wrong = [
            n for n in pt.keys() | again.keys() if n not in pt or n not in again or not np.array_equal(pt[n], again[n])
        ]
        found += [f"{name} does not come back" for name in wrong]
    return found + _side_faults(table, expansion, c, pt, root)


def _side_faults(table: Table, expansion: Expansion, c: Config, pt: Mapping[str, Array], root: str) -> list[str]:
    """What is dropped, tied and kept is stated for each of the entries; against lists written out by hand."""
    found = []
    tied = {e.pt[0]: e for e in expansion.entries if e.kind == "tied"}
    want_tied = tied_copies(table.family, c, root)
    if {name: e.tied for name, e in tied.items()} != want_tied:
        found.append(f"tied: { ({name: e.tied for name, e in tied.items()}) }, not {want_tied}")
    dropped = {name for e in expansion.entries if e.kind == "drop" for name in (*e.pt, *e.ms)}
    want_dropped: set[str] = set()
    if table.family not in HEADS:
        layers = range(c["num_hidden_layers"] + extra_layers(c))
        want_dropped = {f"{root}layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers} | {
            f"{root}rotary_emb.inv_freq"
        }
    if dropped != want_dropped:
        found.append(f"dropped: {sorted(dropped ^ want_dropped)} differ")
    kept = {name for e in expansion.entries if e.kind == "map" and _keeps(e) for name in e.pt if name in pt}
    exact = ("e_score_correction_bias", "position_ids", "token_type_ids")
    want_kept = {name for name in pt if name.endswith(exact)}
    if kept != want_kept:
        found.append(f"kept as they are: {sorted(kept ^ want_kept)} differ")
    optional = {name for e in expansion.entries if e.optional for name in e.pt if name in pt}
    want_optional = {name for name in pt if table.family in HEADS and _may_be_absent(name)}
    if optional != want_optional:
        found.append(f"optional: {sorted(optional ^ want_optional)} differ")
    return found


def _keeps(entry: Entry) -> bool:
    return entry.dtype_pt == "keep" and entry.dtype_ms == "keep"


def _may_be_absent(name: str) -> bool:
    heads = ("cls.", "lm_head.", "classifier.", "qa_outputs.")
    return name.startswith(heads) or ".pooler." in f".{name}" or name.endswith(("_ids",))
