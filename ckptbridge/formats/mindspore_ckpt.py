"""MindSpore's ``.ckpt``: a run of protobuf records, without header, count or end mark.

    Checkpoint  { repeated Value value = 1 }
    Value       { string tag = 1; TensorProto tensor = 2 }
    TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }

Measured with mindspore 2.10.0. A tensor over 512 MiB stands in consecutive records with one tag,
each with the full dims. A string has type ``str``, dims ``[0]`` and UTF-32-LE content. A file may
end in ``crc_num`` and ten bytes, big-endian: the CRC-32 of everything before.

The reader accepts less than MindSpore does: that one fills missing slices with zeros and takes one
of two tensors with the same tag, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptbridge.errors import DTypeError, FormatError, UnsupportedError
from ckptbridge.formats.ckpt_wire import Record, encode_tag, read_record, record_head
from ckptbridge.formats.dtypes import BY_MINDSPORE, BY_NAME, DType
from ckptbridge.formats.files import MAX_HEADER_BYTES, SourceFile, checked_numel, open_source
from ckptbridge.formats.tensors import Checksum, FileLayout, Inventory, Place, Segment, TensorSource, TensorSpec

SLICE_BYTES = 512 << 20  # MindSpore's SLICE_SIZE
MAX_RECORDS = 1_000_000
CRC_MARK = b"crc_num"
CRC_BYTES = len(CRC_MARK) + 10

# The scalars that training leaves among the weights, by where they come from.
TRAINING_STATE = frozenset(
    [
        *("epoch_num", "step_num", "batch_num", "cur_rank", "loss_scale"),  # append_dict of MindSpore's callbacks
        *("global_step", "learning_rate", "weight_decay", "beta1_power", "beta2_power"),  # nn.Optimizer
        *("scale_sense", "current_iterator_step", "last_overflow_iterator_step"),  # nn.TrainOneStepWithLossScaleCell
    ]
)

# The magic numbers before each block of MindSpore's encrypted files: AES-GCM, AES-CBC, SM4-CBC.
_ENCRYPTED = {b"\xd8\x5e\x3a\x7f": "AES-GCM", b"\xd9\x5e\x3a\x7f": "AES-CBC", b"\xda\x5e\x3a\x7f": "SM4-CBC"}


def encryption(start: bytes) -> str | None:
    """The cipher of an encrypted ``.ckpt`` that begins with ``start``, or None."""
    return _ENCRYPTED.get(start[:4])


# --- reading ---------------------------------------------------------------------------------


def read(path: Path, *, verify_crc: bool = False) -> Inventory:
    """The contents of a ``.ckpt`` from its record headers.

    With ``verify_crc`` a crc trailer, when there is one, is checked, which reads the whole file;
    without a trailer there is nothing to check. Scalars of training state (``TRAINING_STATE``) are
    set apart, strings decoded. Raises FormatError naming the tensor and the offset for anything
    malformed, UnsupportedError for encrypted files and map parameters.
    """
    with open_source(path) as source:
        cipher = encryption(source.read(0, min(4, source.size)))
        if cipher:
            raise UnsupportedError(
                f"The checkpoint is encrypted ({cipher}).",
                remedy="Load it with mindspore.load_checkpoint(..., dec_key=...) and save it without enc_key.",
                file=path,
            )
        end, trailer = _trailer(source)
        if verify_crc and trailer is not None:
            _compare_crc(source, end, trailer)
        collected = _Collected(path)
        at = 0
        for _ in range(MAX_RECORDS):
            if at >= end:
                break
            record, at = read_record(source, at, end)
            if record.type == "str":
                collected.add_string(record, _text(source, record))
            else:
                collected.add_tensor(record)
        if at < end:
            raise FormatError(f"The file holds more than {MAX_RECORDS} records.", file=path, offset=at)
        if at == 0:
            raise FormatError("The file holds no record.", remedy="Fetch or save it again.", file=path)
        notes = []
        if trailer is not None:
            notes.append(f"The file has a crc trailer, which {'matches' if verify_crc else 'was not checked here'}.")
    return collected.inventory(notes)


def checksums(path: Path) -> list[Checksum]:
    """The CRC-32 of all records, where the file has a crc trailer."""
    with open_source(path) as source:
        end, trailer = _trailer(source)
        return [] if trailer is None else [Checksum("the records", 0, end, trailer)]


def _trailer(source: SourceFile) -> tuple[int, int | None]:
    """Where the records end, and the crc that the trailer states."""
    end = source.size - CRC_BYTES
    if end < 0 or source.read(end, len(CRC_MARK)) != CRC_MARK:
        return source.size, None
    return end, int.from_bytes(source.read(end + len(CRC_MARK), 10), "big")


def _compare_crc(source: SourceFile, end: int, stated: int) -> None:
    computed = source.crc32(end)
    if computed != stated:
        raise FormatError(
            f"The crc trailer says {stated:#010x}, and the contents have {computed:#010x}.",
            remedy="The file was damaged or changed after it was saved; fetch it again.",
            file=source.path,
            offset=end,
        )


class _Collected:
    """What the records so far add up to; slices join here, and duplicates are told from slices."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorSource] = {}
        self.strings: dict[str, str] = {}
        self.header_bytes = 0
        # The tensor of the records just read, its slices and their bytes; None after a string.
        self.current: TensorSpec | None = None
        self.slices: list[Segment] = []
        self.have = 0

    def fail(self, what: str, record: Record, remedy: str = "") -> FormatError:
        return FormatError(
            what,
            remedy=remedy or "The file is damaged; fetch or save it again.",
            file=self.path,
            tensor=record.tag,
            offset=record.at,
        )

    def add_string(self, record: Record, text: str) -> None:
        self.finish()
        self.begin(record)
        self.strings[record.tag] = text

    def add_tensor(self, record: Record) -> None:
        spec = self.spec(record)
        if self.current is None or not self.continues(record, self.current):
            self.finish()
            self.begin(record)
            self.current = spec
        elif spec != self.current:
            raise self.fail("The slices of a tensor differ in type or dims.", record)
        nbytes = record.content.nbytes
        self.have += nbytes
        if self.have > spec.nbytes:
            raise self.fail(
                f"The tensor has {self.have} bytes and its dims {list(spec.shape)} need {spec.nbytes}.",
                record,
                "The dims are wrong, or a slice stands twice; save the checkpoint again.",
            )
        if nbytes % spec.dtype.itemsize:
            raise self.fail("The content ends within an element.", record)
        if nbytes or not self.slices:
            self.slices.append(record.content)

    def continues(self, record: Record, current: TensorSpec) -> bool:
        """Whether the record is a further slice: the same tag while bytes of the tensor are still to come.

        MindSpore's split by rows may leave empty slices behind, when there are fewer rows than slices.
        """
        if record.tag != current.name:
            return False
        return self.have < current.nbytes or (record.content.nbytes == 0 and current.nbytes > SLICE_BYTES)

    def begin(self, record: Record) -> None:
        """Count the header's bytes, and refuse a tag that was there before."""
        self.header_bytes += len(record.tag) + (record.content.nbytes if record.type == "str" else 0)
        if self.header_bytes > MAX_HEADER_BYTES:
            raise self.fail(f"Tags and strings take more than {MAX_HEADER_BYTES} bytes.", record)
        if record.tag in self.tensors or record.tag in self.strings:
            raise self.fail(
                "Two entries have this tag.",
                record,
                "MindSpore would take one of them without saying which; save the checkpoint again with distinct names.",
            )

    def finish(self) -> None:
        """Take the current tensor, which must be complete by now."""
        spec = self.current
        if spec is None:
            return
        if self.have != spec.nbytes:
            raise FormatError(
                f"The tensor has {self.have} bytes and its dims {list(spec.shape)} need {spec.nbytes}.",
                remedy="A slice is missing or cut (MindSpore would fill in zeros); fetch or save the file again.",
                file=self.path,
                tensor=spec.name,
                offset=self.slices[0].offset,
            )
        self.tensors[spec.name] = TensorSource(spec, tuple(self.slices))
        self.current, self.slices, self.have = None, [], 0

    def spec(self, record: Record) -> TensorSpec:
        dtype = _dtype(record.type)
        if dtype is None:
            raise self.fail(
                f"The type '{record.type}' is not known.",
                record,
                f"Types that can be read: {', '.join(BY_MINDSPORE)}, str.",
            )
        shape = record.dims
        if shape == (0,) and record.content.nbytes == dtype.itemsize:
            shape = ()  # how earlier MindSpore versions wrote a scalar
        if checked_numel(shape, dtype.itemsize) is None:
            raise self.fail(f"The dims {list(shape)} overflow.", record)
        return TensorSpec(record.tag, dtype, shape)

    def inventory(self, notes: list[str]) -> Inventory:
        self.finish()
        state = {n: t for n, t in self.tensors.items() if n in TRAINING_STATE and t.spec.shape in ((), (1,))}
        weights = {n: t for n, t in self.tensors.items() if n not in state}
        if state:
            notes.append(f"Training state is kept apart from the weights: {', '.join(state)}.")
        loose = [n for n, t in weights.items() if t.spec.shape == ()]
        if loose:
            notes.append(f"Scalars that are taken as weights, though append_dict may have made them: {_few(loose)}.")
        return Inventory(self.path, "ckpt", (self.path,), weights, self.strings, state, notes=tuple(notes))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _dtype(name: str) -> DType | None:
    """``Float16``, or ``mindspore.float16`` as some writers left it."""
    prefix, dot, plain = name.partition(".")
    if dot and prefix == "mindspore":
        found = BY_NAME.get(plain.removesuffix("_"))
        return found if found and found.mindspore else None
    return BY_MINDSPORE.get(name)


def _text(source: SourceFile, record: Record) -> str:
    content = record.content
    if content.nbytes > MAX_HEADER_BYTES or content.nbytes % 4:
        raise FormatError(
            f"A string of {content.nbytes} bytes is too long, or not a number of UTF-32 characters.",
            file=source.path,
            tensor=record.tag,
            offset=record.at,
        )
    try:
        text = source.read(content.offset, content.nbytes).decode("utf-32-le")
    except UnicodeDecodeError:
        raise FormatError(
            "A string is not UTF-32.", file=source.path, tensor=record.tag, offset=content.offset
        ) from None
    return text.rstrip("\0")  # as NumPy, and so MindSpore, reads it


# --- writing ---------------------------------------------------------------------------------


def layout(specs: Sequence[TensorSpec], strings: Mapping[str, str]) -> FileLayout:
    """Where every byte of a ``.ckpt`` goes: byte for byte what mindspore.save_checkpoint writes.

    Only the names of ``strings`` matter here: they come last, by :func:`seal`. An empty tensor gets
    a record without content (MindSpore drops it, and loads shape ``(0,)`` as a scalar). Raises
    DTypeError for a dtype that MindSpore's files do not have, FormatError for a name that stands
    twice or is empty.
    """
    seen = set(strings)
    fixed: list[tuple[int, bytes]] = []
    places: list[tuple[Place, ...]] = []
    at = 0
    for spec in specs:
        if spec.name in seen:
            raise FormatError("Two entries of a .ckpt would have this tag.", tensor=spec.name)
        seen.add(spec.name)
        if not spec.dtype.mindspore:
            raise DTypeError(
                f"MindSpore's .ckpt has no type for {spec.dtype}.",
                remedy="Convert to safetensors, or cast with --dtype.",
                tensor=spec.name,
            )
        runs = []
        # One slice even when there is nothing to put into it.
        for start in range(0, spec.nbytes or 1, SLICE_BYTES):
            nbytes = min(SLICE_BYTES, spec.nbytes - start)
            head = record_head(spec.name, spec.shape, spec.dtype.mindspore, nbytes)
            fixed.append((at, head))
            at += len(head)
            if nbytes:
                runs.append(Place(start, at, nbytes))
            at += nbytes
        places.append(tuple(runs))
    for name in strings:
        encode_tag(name)
    return FileLayout(tuple(specs), at, tuple(places), tuple(fixed))


def seal(
    layout: FileLayout, strings: Mapping[str, str], crcs: Sequence[int] | None = None
) -> tuple[tuple[int, bytes], ...]:
    """The string entries, as one run at the end of the file. ``crcs`` are not needed: see :func:`crc_trailer`.

    A tensor's last bytes may look like a crc trailer, to MindSpore as to :func:`read`; a string's cannot, since
    no UTF-32 character has four bytes that are not zero. So a file that is to be read whatever its weights has one.
    """
    names = {spec.name for spec in layout.specs}
    records = []
    for name, text in strings.items():
        if name in names:
            raise FormatError("Two entries of a .ckpt would have this tag.", tensor=name)
        try:
            content = text.encode("utf-32-le") or bytes(4)  # NumPy has no string of length 0
        except UnicodeEncodeError:
            raise FormatError("A string holds half of a surrogate pair.", tensor=name) from None
        records.append(record_head(name, (0,), "str", len(content)) + content)
    return ((layout.size, b"".join(records)),) if records else ()


def crc_trailer(path: Path) -> bytes:
    """The trailer for the finished records in ``path``, to be appended. Reads the whole file."""
    with open_source(path) as source:
        return CRC_MARK + source.crc32(source.size).to_bytes(10, "big")
