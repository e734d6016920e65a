"""Safetensors: eight bytes of header length, a JSON header, and the tensors' bytes without gaps.

The reader refuses whatever the safetensors library (0.8.0) refuses, and more where that one is
silent: duplicate keys, fields that the format does not have, dtypes that no framework here has.
The writer puts tensors in the library's own order (by dtype, widest first), so that every tensor
is aligned; within a dtype the given order stays. The library does not ask for alignment, but
programs that map the file do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptbridge.errors import DTypeError, FormatError, UnsupportedError
from ckptbridge.formats.dtypes import BY_SAFETENSORS
from ckptbridge.formats.files import MAX_DIMS, MAX_HEADER_BYTES, checked_numel, open_source, parse_json
from ckptbridge.formats.shards import (
    MINDSPORE_EXTRA,
    MINDSPORE_INDEX,
    read_index,
    read_weight_map,
    refuse_strays,
    shard_path,
    with_extra,
)
from ckptbridge.formats.tensors import FileLayout, Inventory, Place, Segment, TensorSource, TensorSpec

METADATA = "__metadata__"

# The library's order of data, from its Dtype enumeration; wide to narrow, so that all are aligned.
_DATA_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_RANK = {name: k for k, name in enumerate(_DATA_ORDER)}


# --- reading ---------------------------------------------------------------------------------


def read(path: Path) -> Inventory:
    """The contents of one safetensors file from its header; ``strings`` is its metadata.

    Raises FormatError naming the tensor for a header that is too large, no JSON object, holds a key
    twice, or whose offsets are not exactly the shapes' bytes, one after another up to the end of the
    file.
    """
    with open_source(path) as source:
        length = int.from_bytes(source.read(0, 8), "little")
        if length > MAX_HEADER_BYTES:
            raise FormatError(
                f"The header would be {length} bytes long; the format's bound is {MAX_HEADER_BYTES}.",
                remedy="This is no safetensors file, or it is damaged; fetch it again.",
                file=path,
            )
        header = parse_json(source.read(8, length), path)
        size = source.size
    if not isinstance(header, dict):
        raise FormatError("The header is not a JSON object.", remedy="Fetch the file again.", file=path)
    metadata = _metadata(header.pop(METADATA, None), path)
    begin = 8 + length
    tensors = [_tensor(name, entry, begin, path) for name, entry in header.items()]
    # Where they lie decides, not where they stand in the header.
    tensors.sort(key=lambda tensor: (tensor.segments[0].offset, tensor.segments[0].nbytes))
    at = begin
    for tensor in tensors:
        name, segment = tensor.spec.name, tensor.segments[0]
        if segment.offset != at:
            raise FormatError(
                f"The tensor begins at byte {segment.offset - begin} of the data, and the one before it ends at "
                f"{at - begin}.",
                remedy="Tensors must neither overlap nor leave holes; fetch or save the file again.",
                file=path,
                tensor=name,
            )
        if metadata.get(name) == "Int4":
            raise UnsupportedError(
                "The tensor holds packed 4-bit integers (MindSpore's qint4x2).",
                remedy="Dequantise it with MindSpore first.",
                file=path,
                tensor=name,
            )
        at += segment.nbytes
    if at != size:
        raise FormatError(
            f"The tensors end at byte {at}, and the file at byte {size}.",
            remedy="The file is cut, or something was appended to it; fetch it again.",
            file=path,
        )
    return Inventory(path, "safetensors", (path,), {t.spec.name: t for t in tensors}, metadata)


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(f"{METADATA} is not an object of strings.", remedy="Save the file again.", file=path)
    return value


def _tensor(name: str, entry: Any, begin: int, path: Path) -> TensorSource:
    def fail(what: str) -> FormatError:
        return FormatError(what, remedy="Fetch or save the file again.", file=path, tensor=name)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fail("A header entry is not an object of dtype, shape and data_offsets.")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = BY_SAFETENSORS.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise FormatError(
            f"The dtype {dtype_name!r} is not known.",
            remedy=f"Dtypes that can be read: {', '.join(BY_SAFETENSORS)}.",
            file=path,
            tensor=name,
        )
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise fail(f"The shape is not a list of at most {MAX_DIMS} lengths.")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail("The data_offsets are not a begin and an end.")
    numel = checked_numel(tuple(shape), dtype.itemsize)
    if numel is None:
        raise fail(f"The shape {shape} overflows.")
    nbytes = offsets[1] - offsets[0]
    if nbytes != numel * dtype.itemsize:
        raise fail(f"The data_offsets span {nbytes} bytes, and {shape} of {dtype} needs {numel * dtype.itemsize}.")
    segment = Segment(path, begin + offsets[0], nbytes)
    return TensorSource(TensorSpec(name, dtype, tuple(shape)), (segment,))


def _naturals(value: Any) -> bool:
    # bool is an int to Python, and `true` no length to JSON.
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def read_directory(path: Path, read_shard: Callable[[Path], Inventory] = read) -> Inventory:
    """The shards of a directory with an index, Hugging Face's or MindSpore's; both, if they agree.

    Index and shards are checked against each other, see :func:`ckptbridge.formats.shards.read_index`. MindSpore's
    ``hyper_param.safetensors`` is read too, its scalars apart from the weights.
    """
    indices = sorted(p for p in path.glob("*.safetensors.index.json") if not p.name.startswith("."))
    if (path / MINDSPORE_INDEX).exists():
        indices.append(path / MINDSPORE_INDEX)
    if not indices:
        raise FormatError("The directory has no index of safetensors shards.", remedy="Name a file.", file=path)
    weight_map = read_weight_map(indices[0])
    for other in indices[1:]:
        if read_weight_map(other) != weight_map:
            raise FormatError(
                f"The indices '{indices[0].name}' and '{other.name}' disagree.",
                remedy="Name one of them to convert what it lists.",
                file=path,
            )
    inventory = read_index(indices[0], read_shard)
    known = set(weight_map.values())
    extra = path / MINDSPORE_EXTRA
    beside = indices[-1].name == MINDSPORE_INDEX and extra.name not in known and extra.exists()
    refuse_strays(path, ".safetensors", known | {extra.name} if beside else known, indices[0])
    if not beside:
        return inventory
    return with_extra(inventory, read_shard(shard_path(path, extra.name, indices[-1])))


# --- writing ---------------------------------------------------------------------------------


def layout(specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> FileLayout:
    """Where every byte goes; the header is reserved for metadata as long as ``strings``.

    With specs in the order of their names and the same strings, the file is byte for byte what
    ``safetensors.torch.save_file`` writes. Raises DTypeError for a dtype that the format lacks,
    FormatError for a name that stands twice or cannot be written.
    """
    seen: set[str] = set()
    for spec in specs:
        if spec.name == METADATA or spec.name in seen:
            raise FormatError("Two entries of a safetensors header would have this name.", tensor=spec.name)
        seen.add(spec.name)
        if not spec.dtype.safetensors:
            raise DTypeError(
                f"Safetensors has no dtype for {spec.dtype}.",
                remedy="Cast or drop the tensor, or write a .bin.",
                tensor=spec.name,
            )
    begin = 8 + len(_header(specs, strings))
    places: list[tuple[Place, ...]] = [()] * len(specs)
    for k, start in _data_offsets(specs):
        if specs[k].nbytes:
            places[k] = (Place(0, begin + start, specs[k].nbytes),)
    return FileLayout(tuple(specs), begin + sum(spec.nbytes for spec in specs), tuple(places), ())


def seal(
    layout: FileLayout, strings: Mapping[str, str], crcs: Sequence[int] | None = None
) -> tuple[tuple[int, bytes], ...]:
    """The header, padded with spaces to the reserved length; until it is written, no reader takes the file."""
    reserved = layout.size - 8 - sum(spec.nbytes for spec in layout.specs)
    header = _header(layout.specs, strings)
    if len(header) > reserved:
        raise FormatError(
            f"The header takes {len(header)} bytes, and {reserved} were reserved.",
            remedy="The metadata grew between planning and writing; plan again.",
        )
    return ((0, reserved.to_bytes(8, "little") + header.ljust(reserved)),)


def _data_offsets(specs: Sequence[TensorSpec]) -> list[tuple[int, int]]:
    """(number of the spec, its first byte in the data), in the order of the data."""
    at, placed = 0, []
    for k in sorted(range(len(specs)), key=lambda k: _RANK[specs[k].dtype.safetensors]):
        placed.append((k, at))
        at += specs[k].nbytes
    return placed


def _header(specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {METADATA: dict(strings)} if strings else {}
    for k, start in _data_offsets(specs):
        spec = specs[k]
        entries[spec.name] = {
            "dtype": spec.dtype.safetensors,
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise FormatError("A name or a metadata string holds half of a surrogate pair.") from None
    header = text.ljust(-(-len(text) // 8) * 8)
    if len(header) > MAX_HEADER_BYTES:
        raise FormatError(
            f"The header would be {len(header)} bytes long; the format's bound is {MAX_HEADER_BYTES}.",
            remedy="Write several shards with --max-shard-size.",
        )
    return header
