"""Sharded checkpoints: a JSON index beside its shards, each checked against the other.

Hugging Face names the index ``<name>.index.json``, MindSpore ``param_name_map.json``; both hold
``{"metadata": {"total_size": bytes}, "weight_map": {tensor name: file name}}``, and MindSpore takes
a bare weight map too (mindspore 2.10.0, ``parallel/transform_safetensors.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ckptbridge.errors import FormatError
from ckptbridge.formats.files import MAX_HEADER_BYTES, open_source, parse_json
from ckptbridge.formats.tensors import Inventory, TensorSource

MINDSPORE_INDEX = "param_name_map.json"
# Beside MindSpore's index, and not in it: the parameters that no parallel strategy covers.
MINDSPORE_EXTRA = "hyper_param.safetensors"

_AGAIN = "Fetch or save the checkpoint again, so that index and shards belong together."


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard name, from an index. Raises FormatError when it is malformed."""
    with open_source(index) as source:
        if source.size > MAX_HEADER_BYTES:
            raise FormatError(f"The index is {source.size} bytes long.", file=index)
        value = parse_json(source.read(0, source.size), index)
    weight_map = value.get("weight_map", value) if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FormatError(
            "This JSON file is no index of shards: it holds no map of tensor names to file names.",
            remedy="Name the weights, or the directory that holds them.",
            file=index,
        )
    if not weight_map:
        raise FormatError("The index names no tensor.", remedy=_AGAIN, file=index)
    return weight_map


def shard_path(directory: Path, name: str, named_by: Path) -> Path:
    """The file ``name`` of ``directory``, which must be there and be a plain name.

    A symbolic link must stay in the directory; into the ``blobs`` of the Hugging Face cache is allowed,
    which is how that cache keeps every file. Raises FormatError naming ``named_by`` otherwise.
    """
    path = directory / name
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise FormatError(
            f"The file name '{name}' leads out of the directory of the index.",
            remedy="An index names files beside it; do not use one that does not.",
            file=named_by,
        )
    try:
        there = path.exists()
    except OSError as error:  # a name longer than any file's
        raise FormatError(
            f"The shard '{name[:80]}' cannot be looked for: {error.strerror}.", remedy=_AGAIN, file=named_by
        ) from None
    if not there:
        raise FormatError(f"The shard '{name}' is missing.", remedy=_AGAIN, file=named_by)
    home, target = directory.resolve(), path.resolve()
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if target.parent not in (home, cache):
        raise FormatError(
            f"The shard '{name}' is a link to '{target}', out of the directory.",
            remedy="Put the file itself into the directory, if you trust it.",
            file=named_by,
        )
    return path


def read_index(index: Path, read: Callable[[Path], Inventory]) -> Inventory:
    """The shards of an index as one inventory, ``read`` giving each shard's.

    Index and headers are compared both ways. Raises FormatError for a shard that is missing or named
    twice, a tensor that its shard lacks, that two shards hold, or that the index does not know.
    """
    directory = index.parent
    weight_map = read_weight_map(index)
    expected: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        expected.setdefault(shard, set()).add(tensor)
    paths = {shard: shard_path(directory, shard, index) for shard in sorted(expected)}
    resolved: dict[Path, str] = {}
    for shard, path in paths.items():
        other = resolved.setdefault(path.resolve(), shard)
        if other != shard:
            raise FormatError(f"The shards '{other}' and '{shard}' are one file.", remedy=_AGAIN, file=index)
    shards = {shard: read(path) for shard, path in paths.items()}
    for shard, inventory in shards.items():
        held = inventory.tensors.keys() | inventory.scalars.keys()
        for tensor in sorted(held - expected[shard]):
            elsewhere = weight_map.get(tensor)
            what = f"which the index puts into '{elsewhere}'" if elsewhere else "which the index does not name"
            raise FormatError(f"The shard '{shard}' holds a tensor {what}.", remedy=_AGAIN, file=index, tensor=tensor)
    for shard, inventory in shards.items():
        for tensor in sorted(expected[shard] - inventory.tensors.keys() - inventory.scalars.keys()):
            raise FormatError(f"The shard '{shard}' lacks a tensor.", remedy=_AGAIN, file=index, tensor=tensor)
    return _joined(directory, list(shards.values()))


def refuse_strays(directory: Path, suffix: str, known: Collection[str], index: Path) -> None:
    """Raises FormatError for a file with ``suffix`` that is not ``known`` from the index: part of another checkpoint.

    Hidden files are passed over; an output that is being written is one.
    """
    for path in sorted(directory.iterdir()):
        if path.name.endswith(suffix) and path.name not in known and not path.name.startswith("."):
            raise FormatError(
                f"The file '{path.name}' is not in the index '{index.name}'.",
                remedy=f"Remove it, or name the index itself to convert what it lists: {index}",
                file=path,
            )


def with_extra(inventory: Inventory, extra: Inventory) -> Inventory:
    """``inventory`` with MindSpore's parameters beside the index: one-element ones are training state."""
    for name in extra.tensors.keys() & inventory.tensors.keys():
        raise FormatError("A tensor of the index stands here again.", remedy=_AGAIN, file=extra.path, tensor=name)
    state = {name: t for name, t in extra.tensors.items() if t.spec.numel == 1}
    more = {name: t for name, t in extra.tensors.items() if name not in state}
    return replace(
        inventory,
        files=(*inventory.files, *extra.files),
        tensors={**inventory.tensors, **more},
        scalars={**inventory.scalars, **state},
        notes=(*inventory.notes, f"Training state is kept apart from the weights: {', '.join(state)}.")
        if state
        else inventory.notes,
    )


def _joined(directory: Path, shards: list[Inventory]) -> Inventory:
    tensors: dict[str, TensorSource] = {}
    scalars: dict[str, TensorSource] = {}
    strings: dict[str, str] = {}
    aliases: dict[str, str] = {}
    notes: list[str] = []
    for shard in shards:
        tensors |= shard.tensors
        scalars |= shard.scalars
        aliases |= shard.aliases
        notes += [note for note in shard.notes if note not in notes]
        for key, text in shard.strings.items():
            if strings.setdefault(key, text) != text:
                notes.append(f"The shards differ in the string '{key}'; the first one's is taken.")
    files = tuple(path for shard in shards for path in shard.files)
    return Inventory(directory, shards[0].format, files, tensors, strings, scalars, aliases, tuple(notes))


# --- writing ---------------------------------------------------------------------------------


def index_json(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index that transformers reads beside shards, as it writes it; ``total_size`` is the tensors' bytes."""
    return (json.dumps(_index(weight_map, total_size), indent=2, sort_keys=True) + "\n").encode()


def param_name_map_json(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """``param_name_map.json``, as MindSpore's unified_safetensors writes and load_distributed_checkpoint reads it."""
    return json.dumps(_index(weight_map, total_size), indent=4).encode()


def _index(weight_map: Mapping[str, str], total_size: int) -> dict[str, object]:
    return {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
