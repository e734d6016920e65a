"""PyTorch's ``.bin``, ``.pt`` and ``.pth``, read without PyTorch and without running anything.

Two forms (torch/serialization.py): since 1.6 a stored zip with ``NAME/data.pkl`` and one record
``NAME/data/KEY`` a storage; before that pickles in a row (magic number, protocol, system, object,
storage keys), then each storage as a count of eight bytes and its elements. Views keep offset and
strides, so tied tensors are one storage. Only pickles and directories are read, never the data.
"""

from __future__ import annotations

import glob
import zlib
from collections.abc import Mapping
from pathlib import Path

from ckptbridge.errors import FormatError, UnsupportedError
from ckptbridge.formats.files import SourceFile, open_source
from ckptbridge.formats.pickle_objects import Global
from ckptbridge.formats.pickles import Pickle, PickleStream, interpret
from ckptbridge.formats.shards import read_index, read_weight_map, shard_path
from ckptbridge.formats.tensors import Checksum, Inventory, Segment, TensorSource, TensorSpec
from ckptbridge.formats.torch_values import CONSTRUCTORS, Storage, Storages, Tensor
from ckptbridge.formats.wrappers import Weights, find_weights
from ckptbridge.formats.zips import LOCAL_MAGIC, Record, directory_of, read_zip

SINGLE = "pytorch_model.bin"
INDEX = ".bin.index.json"
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_COUNT = 8  # bytes before each storage of the older form
_SHOWN = 8
_DAMAGED = "The file is damaged; get it again from where it was made."
_RESAVE = "Load the file in PyTorch and save the state dict again with torch.save."


def read(path: Path, key: str | None = None) -> Inventory:
    """The tensors of a ``.bin`` file and where their bytes lie; names are as in the file.

    ``key`` is the dotted path of the dict to take when the file holds several. Raises FormatError
    for what is malformed, hostile or ambiguous and UnsupportedError for what is recognised and not
    converted.
    """
    with open_source(path) as source:
        start = source.read(0, min(4, source.size))
        if start == LOCAL_MAGIC:
            return _read_zip_form(source, key)
        if start[:1] == b"\x80":
            return _read_older_form(source, key)
        if source.size >= 512 and source.read(257, 5) == b"ustar":
            raise UnsupportedError(
                "This is a tar file, which PyTorch wrote before its version 0.1.10.", remedy=_RESAVE, file=path
            )
    raise FormatError(
        "The file is neither a zip archive nor a pickle, so it is no PyTorch checkpoint.",
        remedy="Check that it was downloaded completely and is the file that you mean.",
        file=path,
    )


def read_directory(path: Path, key: str | None = None) -> Inventory:
    """The shards that a directory's ``*.bin.index.json`` names, or its ``pytorch_model.bin``.

    Index and shards are compared both ways. Raises FormatError, beside what :func:`read` raises,
    when they disagree or a shard of another checkpoint is among them.
    """
    indices = sorted(path.glob(f"*{INDEX}"))
    if not indices:
        if not (path / SINGLE).is_file():
            raise FormatError(
                f"The directory has neither '{SINGLE}' nor an index of shards.",
                remedy="Name the checkpoint file itself.",
                file=path,
            )
        return read(shard_path(path, SINGLE, path), key)
    if len(indices) > 1:
        raise FormatError(
            f"The directory has several indices: {', '.join(index.name for index in indices)}.",
            remedy="Name the one to take.",
            file=path,
        )
    index = indices[0]
    named = set(read_weight_map(index).values())
    for file in sorted(path.glob(f"{glob.escape(index.name.removesuffix(INDEX))}*.bin")):
        if file.name not in named:
            raise FormatError(
                f"The file '{file.name}' is not in the index '{index.name}'.",
                remedy=f"Remove the file, or the index, whichever is old; or name the index: {index}",
                file=file,
            )
    return read_index(index, lambda shard: read(shard, key))


# --- the zip form ----------------------------------------------------------------------------


def _read_zip_form(source: SourceFile, key: str | None) -> Inventory:
    records = read_zip(source)
    folder = directory_of(records, "data.pkl")
    if folder is None:
        raise FormatError(
            "The zip archive is no PyTorch checkpoint: it has not one record 'data.pkl' in one folder.",
            remedy="Name a file that torch.save wrote.",
            file=source.path,
        )
    if f"{folder}/constants.pkl" in records:
        raise UnsupportedError(
            "This is a TorchScript archive, a program with its weights.",
            remedy="Save the weights alone: torch.save(torch.jit.load(FILE).state_dict(), NEW).",
            file=source.path,
        )
    order = records.get(f"{folder}/byteorder")
    if order is not None and (order.nbytes > 16 or source.read(order.offset, order.nbytes) != b"little"):
        raise UnsupportedError("The file is from a big-endian machine.", remedy=_RESAVE, file=source.path)
    main = records[f"{folder}/data.pkl"]
    storages = Storages()
    stream = PickleStream(source, main.offset, main.offset + main.nbytes)
    pickle = interpret(stream, CONSTRUCTORS, storages.persistent)
    if stream.at != stream.end:
        raise stream.bad("Bytes follow the end of the pickle.")
    places = {name: _record_place(source, records, folder, storage) for name, storage in storages.by_key.items()}
    notes = _check_crc(source, main, records)
    return _inventory(source, pickle, find_weights(pickle.value, key, source.path), places, notes)


def _record_place(source: SourceFile, records: Mapping[str, Record], folder: str, storage: Storage) -> int:
    """The offset of a storage's data."""
    record = records.get(f"{folder}/data/{storage.key}")
    if record is None or record.nbytes != storage.nbytes:
        found = "missing" if record is None else f"{record.nbytes} bytes long"
        raise FormatError(
            f"Storage '{storage.key}' of {storage.nbytes} bytes is {found} in the archive.",
            remedy=_DAMAGED,
            file=source.path,
        )
    return record.offset


def _check_crc(source: SourceFile, main: Record, records: Mapping[str, Record]) -> list[str]:
    """Compare the pickle with its CRC-32, unless the file was written without any."""
    if not _with_crcs(records):
        return ["The file was written without checksums (torch.serialization.set_crc32_options)."]
    crc = 0
    for at in range(main.offset, main.offset + main.nbytes, 1 << 20):
        crc = zlib.crc32(source.read(at, min(1 << 20, main.offset + main.nbytes - at)), crc)
    if crc != main.crc:
        raise FormatError(
            f"The CRC-32 of 'data.pkl' is {crc:08x} and should be {main.crc:08x}.",
            remedy=_DAMAGED,
            file=source.path,
            offset=main.offset,
        )
    return []


def _with_crcs(records: Mapping[str, Record]) -> bool:
    return any(record.crc for record in records.values())


def checksums(path: Path) -> list[Checksum]:
    """The CRC-32s of the zip form's records, unless it was written without. The older form has none."""
    with open_source(path) as source:
        records = read_zip(source) if source.read(0, min(4, source.size)) == LOCAL_MAGIC else {}
    if not _with_crcs(records):
        return []
    return [Checksum(f"'{record.name}'", record.offset, record.nbytes, record.crc) for record in records.values()]


# --- the older form --------------------------------------------------------------------------


def _read_older_form(source: SourceFile, key: str | None) -> Inventory:
    stream = PickleStream(source, 0, source.size)
    plain = Storages()

    def number() -> object:
        return interpret(stream, {}, plain.persistent).value

    if number() != MAGIC_NUMBER:
        raise FormatError(
            "The file is a pickle and was not written by torch.save.",
            remedy="Save the tensors with torch.save; other pickles are not read.",
            file=source.path,
        )
    version = number()
    if version != PROTOCOL_VERSION:
        raise FormatError(f"PyTorch's protocol {PROTOCOL_VERSION} is due here.", remedy=_RESAVE, file=source.path)
    system = number()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UnsupportedError("The file is from a big-endian machine.", remedy=_RESAVE, file=source.path)
    storages = Storages()
    pickle = interpret(stream, CONSTRUCTORS, storages.persistent)
    keys = interpret(stream, {}, plain.persistent).value
    places, notes = _storage_places(source, stream.at, keys, storages)
    return _inventory(source, pickle, find_weights(pickle.value, key, source.path), places, notes)


def _storage_places(source: SourceFile, at: int, keys: object, storages: Storages) -> tuple[dict[str, int], list[str]]:
    """The offset of each storage's data, behind its count, from ``at`` on; and a note if bytes follow the last."""

    def bad(what: str) -> FormatError:
        return FormatError(what, remedy=_DAMAGED, file=source.path, offset=at)

    if not isinstance(keys, list):
        raise bad("The list of storages is none.")
    places: dict[str, int] = {}
    for key in keys:
        storage = storages.by_key.get(str(key)) if isinstance(key, (str, int)) else None
        if storage is None or storage.key in places:
            raise bad(f"Storage '{key}' is listed twice, or in no tensor.")
        count = int.from_bytes(source.read(at, _COUNT), "little")
        if count != storage.numel or at + _COUNT + storage.nbytes > source.size:
            raise bad(
                f"Storage '{key}' should have {storage.numel} elements; {count} are announced "
                f"and {source.size - at - _COUNT} bytes are left in the file."
            )
        places[storage.key] = at + _COUNT
        at += _COUNT + storage.nbytes
    missing = next((key for key in storages.by_key if key not in places), None)
    if missing is not None:
        raise bad(f"Storage '{missing}' is missing in the list of storages.")
    left = source.size - at
    return places, [f"{left} bytes follow the last storage; they were not read."] if left else []


# --- both forms ------------------------------------------------------------------------------


def _inventory(
    source: SourceFile, pickle: Pickle, weights: Weights, places: Mapping[str, int], notes: list[str]
) -> Inventory:
    tensors: dict[str, TensorSource] = {}
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in weights.tensors.items():
        storage = tensor.storage
        nbytes = storage.view_nbytes - storage.view_nbytes % tensor.dtype.itemsize
        segment = Segment(source.path, places[storage.key] + storage.start, nbytes)
        spec = TensorSpec(name, tensor.dtype, tensor.shape)
        tensors[name] = TensorSource(spec, (segment,), tensor.offset, tensor.strides)
        same = (segment, tensor.dtype, tensor.offset, tensor.shape, tensor.strides)
        if spec.numel and same in first:
            aliases[name] = first[same]
        first.setdefault(same, name)
    return Inventory(
        path=source.path,
        format="bin",
        files=(source.path,),
        tensors=tensors,
        aliases=aliases,
        notes=(*weights.notes, *notes, *_subclasses(weights.tensors), *_stubs(pickle.stubbed)),
    )


def _subclasses(tensors: Mapping[str, Tensor]) -> list[str]:
    kinds = sorted({tensor.subclass for tensor in tensors.values() if tensor.subclass})
    return [f"Tensors of {', '.join(kinds[:_SHOWN])} were taken as plain ones."] if kinds else []


def _stubs(stubbed: Mapping[Global, int]) -> list[str]:
    if not stubbed:
        return []
    shown = ", ".join(f"{name} ({count})" for name, count in list(stubbed.items())[:_SHOWN])
    more = f" and {len(stubbed) - _SHOWN} more" if len(stubbed) > _SHOWN else ""
    return [f"Named in the file, neither imported nor called: {shown}{more}."]
