"""Where the output goes: one file or a directory, its format, and how records fall into shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptbridge.conversion.plan import FORMATS, SUFFIXES, OutputFile, Record, file_suffixes
from ckptbridge.conversion.provenance import TAG, dumps
from ckptbridge.conversion.request import Request
from ckptbridge.errors import UsageError
from ckptbridge.formats import mindspore_ckpt, safetensors, torch_zip
from ckptbridge.formats.tensors import FileLayout, TensorSpec

DEFAULT_SHARD_BYTES = 5_000_000_000
# Formats that are not written: under such a name a directory would be taken for a file of them.
_FOREIGN_SUFFIXES = frozenset(
    {
        *(".gguf", ".ggml", ".npz", ".npy", ".onnx", ".h5", ".hdf5", ".keras", ".msgpack", ".pb", ".tflite"),
        *(".mindir", ".pkl", ".pickle", ".json", ".zip", ".tar", ".gz"),
    }
)
# Spaces that a safetensors header keeps free for counts that are only known at the end.
_SLACK = 256


@dataclass(frozen=True, slots=True)
class Destination:
    """``path`` is the file, or the directory that will be created."""

    path: Path
    directory: bool
    format: str


def destination_of(request: Request) -> Destination:
    """Decide file or directory by the name's suffix, and the format; raises UsageError where options disagree."""
    _refuse_name(request)
    suffix = SUFFIXES.get(request.destination.suffix.lower())
    allowed = FORMATS[request.direction]
    given = request.format
    if suffix and given and suffix != given:
        raise UsageError(
            f"The destination ends in '{request.destination.suffix}', and --format says {given}.",
            remedy="Give one of the two, or let them agree.",
            option="--format",
        )
    chosen = suffix or given or allowed[0]
    if chosen not in allowed:
        reader = "MindSpore" if request.direction == "pt2ms" else "PyTorch"
        refusal = f"{request.direction} does not write {chosen}: {reader} does not read it."
        if suffix:
            raise UsageError(
                f"The destination ends in '{request.destination.suffix}', and {refusal}",
                remedy=_names(request),
                file=request.destination,
            )
        raise UsageError(refusal, remedy=f"Use one of: {', '.join(allowed)}.", option="--format")
    directory = suffix is None
    path = _folder(request.destination) if directory else request.destination
    if request.max_shard_size is not None and (chosen == "ckpt" or not directory):
        what = "A .ckpt has no index of shards" if chosen == "ckpt" else "A single file has no shards"
        raise UsageError(
            f"{what}, so --max-shard-size cannot be used.",
            remedy="Leave it out, or write a directory of safetensors (--format safetensors).",
            option="--max-shard-size",
        )
    if request.crc and chosen != "ckpt":
        raise UsageError("Only a .ckpt has a crc trailer.", remedy="Leave --crc out.", option="--crc")
    return Destination(path, directory, chosen)


def _refuse_name(request: Request) -> None:
    """Raise UsageError for a destination whose name means something that is not written."""
    path = request.destination
    if str(path) == "-":
        what = "A checkpoint is not written to standard output."
    elif path.suffix.lower() in _FOREIGN_SUFFIXES:
        what = f"The destination ends in '{path.suffix}', and files of that kind are not written."
    else:
        return
    raise UsageError(what, remedy=_names(request), file=path)


def _names(request: Request) -> str:
    suffixes = file_suffixes(request.direction)
    return f"Name a file that ends in {', '.join(suffixes[:-1])} or {suffixes[-1]}, or a directory under another name."


def _folder(path: Path) -> Path:
    """The folder that will appear by a rename; raises UsageError for one that no rename can replace."""
    if path.is_symlink() or path.name in ("", ".."):
        path = path.resolve()
    if path.is_dir() and (path.samefile(Path.cwd()) or path.is_mount()):
        what = "a mount point" if path.is_mount() else "the current directory"
        raise UsageError(
            f"The destination is {what}, and an output appears by the renaming of a whole folder.",
            remedy=f"Name a new folder in it, such as {path / 'model'}",
            file=path,
        )
    return path


def refuse_source(destination: Destination, files: Sequence[Path]) -> None:
    """Raise UsageError when writing the destination would replace one of the source's files."""
    for file in files:
        if destination.directory:
            within = destination.path.resolve() in file.resolve().parents
        else:
            within = destination.path.exists() and destination.path.samefile(file)
        if within:
            raise UsageError(
                f"The destination would replace the source '{file.name}'.",
                remedy="Choose another destination.",
                file=destination.path,
            )


def output_files(
    destination: Destination, records: Sequence[Record], request: Request, trail: Mapping[str, Any]
) -> tuple[OutputFile, ...]:
    """The weights files with their records and geometry. Raises DTypeError for a dtype that the format lacks."""
    limit = request.max_shard_size or DEFAULT_SHARD_BYTES
    one = not destination.directory or destination.format == "ckpt"
    shards = [list(records)] if one else _shards(records, limit)
    strings = embedded(destination.format, request.direction, trail, _SLACK)
    files = []
    for k, shard in enumerate(shards, 1):
        name = destination.path.name if not destination.directory else _file_name(destination.format, k, len(shards))
        files.append(OutputFile(name, tuple(shard), layout_file(destination.format, [r.spec for r in shard], strings)))
    return tuple(files)


def layout_file(format_name: str, specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> FileLayout:
    """The geometry of a file of that format."""
    return _writer(format_name).layout(specs, strings)


def seal_file(
    format_name: str, layout: FileLayout, strings: Mapping[str, str], crcs: Sequence[int] | None
) -> tuple[tuple[int, bytes], ...]:
    """The bytes of a file that depend on what was written, as (offset, bytes)."""
    return _writer(format_name).seal(layout, strings, crcs)


class _Writer(Protocol):
    """What each format's module offers."""

    def layout(self, specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> FileLayout: ...

    def seal(
        self, layout: FileLayout, strings: Mapping[str, str], crcs: Sequence[int] | None
    ) -> tuple[tuple[int, bytes], ...]: ...


def _writer(format_name: str) -> _Writer:
    writers: dict[str, _Writer] = {"ckpt": mindspore_ckpt, "safetensors": safetensors, "bin": torch_zip}
    return writers[format_name]


def embedded(format_name: str, direction: str, trail: Mapping[str, Any], slack: int = 0) -> dict[str, str]:
    """The string entries of a weights file: the provenance, and safetensors' mark of the framework."""
    if format_name == "bin":
        return {}
    text = dumps(trail)
    if format_name == "ckpt":
        return {TAG: text}
    return {"format": "ms" if direction == "pt2ms" else "pt", TAG: text + " " * slack}


def _shards(records: Sequence[Record], limit: int) -> list[list[Record]]:
    """Records in order, a new shard wherever the limit would be passed."""
    shards: list[list[Record]] = [[]]
    size = 0
    for record in records:
        if shards[-1] and size + record.spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(record)
        size += record.spec.nbytes
    return shards


def _file_name(format_name: str, k: int, n: int) -> str:
    stem, suffix = {
        "ckpt": ("model", ".ckpt"),
        "safetensors": ("model", ".safetensors"),
        "bin": ("pytorch_model", ".bin"),
    }[format_name]
    return f"{stem}{suffix}" if n == 1 else f"{stem}-{k:05d}-of-{n:05d}{suffix}"
