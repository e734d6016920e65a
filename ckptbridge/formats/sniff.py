"""What a file is, from its first bytes: a format that can be read, or one of the wrong files people have."""

from __future__ import annotations

from pathlib import Path

from ckptbridge.errors import CkptBridgeError, FormatError, UnsupportedError
from ckptbridge.formats.files import MAX_HEADER_BYTES, open_source
from ckptbridge.formats.mindspore_ckpt import encryption

SAFETENSORS, CKPT, BIN, INDEX = "safetensors", "ckpt", "bin", "index"

_HEAD = 4096  # longer than any tag that a network has
_DOWNLOAD = "Download the file itself again."

# First bytes, what such a file is, and what to do.
_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (b"GGUF", "a GGUF file (llama.cpp)", "Convert from the original Hugging Face checkpoint, not the quantised one."),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, TensorFlow)", "Load it with transformers' from_tf and save it again."),
    (b"\x93NUMPY", "a NumPy array file", "Save the arrays as one safetensors file."),
    (b"\x1f\x8b", "compressed with gzip", "Decompress it first (gunzip, or tar -xzf)."),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard", "Decompress it first (unzstd)."),
    (b"\xfd7zXZ\x00", "compressed with xz", "Decompress it first (unxz)."),
    (b"BZh", "compressed with bzip2", "Decompress it first (bunzip2)."),
)
_LFS = b"version https://git-lfs.github.com/spec/"
_TF_INDEX = (0xDB4775248B80FB57).to_bytes(8, "little")  # the last bytes of TensorFlow's .index (a LevelDB table)


def sniff(path: Path) -> str:
    """``safetensors``, ``ckpt``, ``bin`` or ``index``: which reader takes the file, by its content.

    Raises UnsupportedError for a file that is recognised as something else, FormatError for one that is empty or
    not recognised; each with what to do.
    """
    with open_source(path) as source:
        if source.size == 0:
            raise FormatError("The file is empty.", remedy=_DOWNLOAD, file=path)
        head = source.read(0, min(_HEAD, source.size))
        tail = source.read(max(0, source.size - 8), min(8, source.size))
        if _is_safetensors(head):
            return SAFETENSORS
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) or (head[0] == 0x80 and head[1:2] <= b"\x05"):
            return BIN
        if encryption(head) or _is_ckpt(head):
            return CKPT
        if head.lstrip().startswith(b"{"):
            return INDEX
        raise _wrong(path, head, tail)


def _is_safetensors(head: bytes) -> bool:
    return int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES and head[8:].lstrip(b" \t\r\n").startswith(b"{")


def _is_ckpt(head: bytes) -> bool:
    """Whether a .ckpt record begins here, as far as its tag; other protobuf files begin with 0x0a too."""
    if head[0] != 0x0A:
        return False
    at = _after_varint(head, 1)
    if head[at : at + 1] != b"\x0a":
        return False
    start = _after_varint(head, at + 1)
    length = sum((byte & 0x7F) << (7 * k) for k, byte in enumerate(head[at + 1 : start]))
    # 0x12 is the tensor and 0x1a a map parameter; sentencepiece's models go on with 0x15.
    return length > 0 and head[start + length : start + length + 1] in (b"\x12", b"\x1a", b"")


def _after_varint(head: bytes, at: int) -> int:
    while at < len(head) and head[at] >= 0x80:
        at += 1
    return at + 1


def _wrong(path: Path, head: bytes, tail: bytes) -> CkptBridgeError:
    for magic, what, remedy in _FOREIGN:
        if head.startswith(magic):
            return UnsupportedError(f"This is {what}.", remedy=remedy, file=path)
    text = head.lstrip().lower()
    if head.startswith(_LFS):
        return UnsupportedError(
            "This is a git-LFS pointer, not the file it stands for.",
            remedy="Run `git lfs pull` in the repository, or download the file itself.",
            file=path,
        )
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<error")):
        return UnsupportedError(
            "This is a web page, not a checkpoint.",
            remedy="The download was answered by an error or login page; open the file in an editor to see which, "
            "log in or accept the model's terms, and download again.",
            file=path,
        )
    if head[257:262] == b"ustar":
        return UnsupportedError(
            "This is a tar archive: a packed directory, or PyTorch's format before version 0.2.",
            remedy="Unpack it (tar -xf); a file of such an old PyTorch must be loaded and saved with a newer one.",
            file=path,
        )
    if tail == _TF_INDEX:
        return UnsupportedError(
            "This is the index of a TensorFlow checkpoint.",
            remedy="Load it with transformers' from_tf and save it again.",
            file=path,
        )
    if head[0] == 0x0A and head[1:2] and head[2 : 2 + head[1]].replace(b".", b"").isdigit():
        return UnsupportedError(
            "This is a MindIR file: a compiled graph, not a checkpoint.",
            remedy="Save the network's parameters with mindspore.save_checkpoint.",
            file=path,
        )
    if not any(head):
        return FormatError(
            "The file begins with zeros.",
            remedy="A download or copy was interrupted; " + _DOWNLOAD[0].lower() + _DOWNLOAD[1:],
            file=path,
        )
    return FormatError(
        "The content is not recognised.",
        remedy="Files that can be read: safetensors, MindSpore .ckpt, PyTorch .bin/.pt/.pth, and indices of shards.",
        file=path,
    )
