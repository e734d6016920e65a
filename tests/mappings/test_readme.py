"""The examples of mappings/README.md, taken from the page and carried out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from ckptbridge.formats.tensors import contiguous_strides
from ckptbridge.tables.expand import Entry, expand
from ckptbridge.tables.proof import prove
from ckptbridge.tables.rules import RULE_KEYS
from ckptbridge.tables.sources import KEYS, shipped_directory
from ckptbridge.tables.table import load_table

PAGE = (shipped_directory() / "README.md").read_text(encoding="utf-8")


@dataclass
class Example:
    title: str
    blocks: dict[str, str] = field(default_factory=dict)  # fence language -> text


def examples() -> Iterator[Example]:
    """Each section with fenced blocks."""
    example, language = Example(""), None
    for line in PAGE.splitlines():
        if language is None and line.startswith("## "):
            if example.blocks:
                yield example
            example = Example(line[3:])
        elif line.startswith("```"):
            language = line[3:] if language is None else None
            if language is not None:
                assert language not in example.blocks, (example.title, language)
                example.blocks[language] = ""
        elif language is not None:
            example.blocks[language] += line + "\n"
    if example.blocks:
        yield example


EXAMPLES = list(examples())


def listed(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...] | None) -> str:
    if shapes is None:
        return ", ".join(names)
    return ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))


def shown(entry: Entry) -> str:
    """An entry as the page writes it."""
    pt = listed(entry.pt, entry.pt_shapes)
    if entry.kind == "drop":
        return f"{pt} dropped: {entry.rule.drop}"
    if entry.kind == "tied":
        return f"{pt} tied to {entry.tied_pt}"
    return f"{pt} = {listed(entry.ms, entry.ms_shapes)}"


def carried_out(entry: Entry, pt: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The MindSpore tensors of an entry, element by element from its blocks."""
    bound = entry.bound
    made = [np.zeros(int(np.prod(shape)), np.int64) for shape in bound.right]
    for block in bound.blocks:
        source = pt[entry.pt[block.left.tensor]].reshape(-1)
        steps = block.left.strides(contiguous_strides(bound.left[block.left.tensor]))
        places = block.right.strides(contiguous_strides(bound.right[block.right.tensor]))
        start = block.left.offset(contiguous_strides(bound.left[block.left.tensor]))
        place = block.right.offset(contiguous_strides(bound.right[block.right.tensor]))
        for at in np.ndindex(*block.sizes):
            made[block.right.tensor][place + np.dot(at, places)] = source[start + np.dot(at, steps)]
    return {name: flat.reshape(shape) for name, flat, shape in zip(entry.ms, made, bound.right, strict=True)}


def test_the_page_has_five_examples():
    assert len(EXAMPLES) == 5
    assert all({"toml", "json", "text"} <= example.blocks.keys() for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_an_example_is_what_the_page_says(example, tmp_path):
    path = tmp_path / "example.toml"
    path.write_text(example.blocks["toml"], encoding="utf-8")
    table = load_table(path)
    expansion = expand(table, json.loads(example.blocks["json"]))
    prove(expansion)
    assert [shown(entry) for entry in expansion.entries] == example.blocks["text"].splitlines()
    for options in table.layout.values():
        for value in options:
            prove(expand(table, expansion.config, {next(iter(table.layout)): value}))

    mapped = [entry for entry in expansion.entries if entry.kind == "map"]
    pt, start = {}, 1
    for entry in mapped:
        for name, shape in zip(entry.pt, entry.pt_shapes, strict=True):
            size = int(np.prod(shape))
            pt[name] = np.arange(start, start + size).reshape(shape)
            start += size
    moved = {name: array for entry in mapped for name, array in carried_out(entry, pt).items()}
    if "python" in example.blocks:
        ms: dict[str, np.ndarray] = {}
        exec(example.blocks["python"], {"np": np, "pt": pt, "ms": ms})  # the page's own formula
    else:
        ms = {name: pt[source] for entry in mapped for source, name in zip(entry.pt, entry.ms, strict=True)}
    assert moved.keys() == ms.keys()
    for name, array in moved.items():
        np.testing.assert_array_equal(array, ms[name])


def test_the_page_names_every_key():
    for key in (*KEYS, *RULE_KEYS):
        assert f"`{key}`" in PAGE or f"`[{key}]`" in PAGE or f"[{key}.NAME]" in PAGE or f"[[{key}]]" in PAGE, key
