"""Entries against an inventory: every source tensor consumed once or dropped with a reason.

What does not fit is collected, so that one error names all of it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from ckptbridge.conversion.cast import cast_target, check_cast
from ckptbridge.conversion.plan import Allowed, Comparison, Direction, Dropped, Record, Scale
from ckptbridge.conversion.reading import identity
from ckptbridge.conversion.request import Request, Understood, other_direction
from ckptbridge.errors import ConfigError, CoverageError, DTypeError, ShapeError
from ckptbridge.formats.dtypes import BY_NAME, DType, dtype_named
from ckptbridge.formats.tensors import TensorSource, TensorSpec
from ckptbridge.tables.axes import Block, BoundAxes
from ckptbridge.tables.expand import Entry
from ckptbridge.tables.table import Fp8

_SHOWN = 8  # names listed in an error

# For one target tensor: which source tensors of the entry it takes, and its blocks over them.
_Parts = tuple[tuple[int, ...], tuple[Block, ...]]


class Matcher:
    """Walks the entries once, collecting what fits and everything that does not."""

    def __init__(self, known: Understood, request: Request) -> None:
        self.known = known
        self.request = request
        self.from_pt = known.direction == "pt2ms"
        self.tensors = known.inventory.tensors
        self.cast: DType | None = None
        if request.dtype is not None:
            self.cast = cast_target(request.dtype, (tensor.spec.dtype for tensor in self.tensors.values()))
        self.records: list[Record] = []
        self.dropped: list[Dropped] = []
        self.comparisons: list[Comparison] = []
        self.absent: list[str] = []
        self.missing: list[tuple[str, Entry]] = []
        self._gone: list[str] = []  # all that the table names and the source lacks, allowed or not
        self._left: list[str] = []  # all that the source has and the table does not name
        self._allowed: dict[tuple[Literal["absent", "left out"], str], list[str]] = {}
        self.consumed: set[str] = set()
        self.dequantised = False
        # Bound axes are shared by all layers: what follows from them is worked out once. The key is
        # their id, so the value keeps them alive.
        self._targets: dict[int, tuple[BoundAxes, list[_Parts]]] = {}

    def match(self) -> None:
        entries = self.known.expansion.entries
        for entry in entries:
            self._entry(entry)
        self._scalars()
        unexpected = self._unexpected()
        if self.missing or unexpected:
            raise _coverage_error(self, unexpected)
        if not self.records:
            raise CoverageError(
                "Nothing would be converted: no tensor of the source is named by the table.",
                remedy="Check --target and --mapping against 'ckptbridge inspect'.",
                file=self.known.inventory.path,
                table=self.known.expansion.table.name,
            )

    def _entry(self, entry: Entry) -> None:
        names = entry.pt if self.from_pt else entry.ms
        there = [name for name in names if name in self.tensors]
        if entry.kind == "drop":
            self.consumed.update(there)
            self.dropped += [Dropped(name, entry.rule.drop) for name in there]
        elif entry.kind == "tied":
            self._tied(entry, there)
        elif len(there) == len(names):
            self._map(entry, names)
        elif there or not entry.optional:
            self._incomplete(entry, names, there)
        else:
            self._gone += names

    def _tied(self, entry: Entry, there: Sequence[str]) -> None:
        reference = entry.tied_pt if self.from_pt else entry.tied_ms
        for name in there:
            if reference not in self.tensors:
                self.missing.append((reference, entry))
                continue
            self.consumed.add(name)
            a, b = self.tensors[name], self.tensors[reference]
            if a.spec.shape != b.spec.shape or a.spec.dtype != b.spec.dtype:
                raise ShapeError(
                    f"'{name}' ({a.spec.dtype}, {list(a.spec.shape)}) should equal '{reference}' "
                    f"({b.spec.dtype}, {list(b.spec.shape)}), to which the config ties it.",
                    remedy="Correct the config (tie_word_embeddings) or the checkpoint.",
                    tensor=name,
                    rule=entry.rule,
                )
            self.comparisons.append(Comparison(a, b, str(entry.rule)))
            self.dropped.append(Dropped(name, f"equal to '{reference}', to which the config ties it"))
        if not self.from_pt and self.known.carried is not None:
            self._restore_tied(entry, self.known.carried.tied)

    def _restore_tied(self, entry: Entry, tied: Mapping[str, str]) -> None:
        """Write again the equal copies that the PyTorch source had, as its provenance says."""
        reference = self.known.expansion.by_pt.get(entry.tied_pt)
        for name in entry.pt:
            if tied.get(name) != entry.tied_pt or reference is None or reference.kind != "map":
                continue
            if all(source in self.tensors for source in reference.ms):
                for record in self._records(reference, reference.ms):
                    if record.spec.name == entry.tied_pt:
                        spec = TensorSpec(name, record.spec.dtype, record.spec.shape)
                        self.records.append(
                            Record(spec, record.sources, record.blocks, str(entry.rule), record.axes, record.scales)
                        )

    def _incomplete(self, entry: Entry, names: Sequence[str], there: Sequence[str]) -> None:
        gone = [name for name in names if name not in self.tensors]
        self._gone += gone
        allowed = {name: by for name in gone if (by := self._may_lack(name, entry))}
        if len(allowed) == len(gone) and not there:
            self.absent += gone
            for name, by in allowed.items():
                self._allowed.setdefault(("absent", by), []).append(name)
            return
        if allowed and there:
            first = next(iter(allowed))
            raise CoverageError(
                f"'{first}' may be missing, but it is made into one tensor with '{there[0]}', which is there.",
                remedy="Give the whole group, or leave the whole group out.",
                tensor=first,
                rule=entry.rule,
            )
        self.missing += [(name, entry) for name in gone if name not in allowed]
        self.consumed.update(there)  # they are known; only their partners are not there

    def _may_lack(self, name: str, entry: Entry) -> str:
        """What allows the source to lack a tensor, or an empty string."""
        pattern = _matches(name, self.request.allow_missing)
        if pattern:
            return f"--allow-missing '{pattern}'"
        # What the source of the conversion before this one lacked, it could not write.
        before = self.known.carried.absent if self.known.carried is not None else frozenset()
        counterparts = entry.ms if self.from_pt else entry.pt
        return "the provenance" if counterparts and before.issuperset(counterparts) else ""

    def _map(self, entry: Entry, names: Sequence[str]) -> None:
        for name in names:
            if name in self.consumed:
                raise CoverageError(
                    f"'{name}' is taken by two rules.", remedy="Correct the table.", tensor=name, rule=entry.rule
                )
        self.consumed.update(names)
        records = self._records(entry, names)
        self.records += records
        self.records += self._carry_scales(entry, records)

    def _records(self, entry: Entry, names: Sequence[str]) -> list[Record]:
        sources = [self.tensors[name] for name in names]
        shapes = [s.spec.shape for s in sources]
        bound = entry.bind("pt" if self.from_pt else "ms", shapes)
        targets = entry.ms if self.from_pt else entry.pt
        target_shapes = bound.right if self.from_pt else bound.left
        axes = "" if entry.rule.axes is None or entry.rule.axes.identity else entry.rule.axes.text
        found = []
        for name, shape, (used, blocks) in zip(targets, target_shapes, self._by_target(bound), strict=True):
            own = tuple(sources[k] for k in used)
            scales = self._scales(own)
            dtype = self._target_dtype(entry, name, own, scales)
            found.append(Record(TensorSpec(name, dtype, shape), own, blocks, str(entry.rule), axes, scales))
        return found

    def _by_target(self, bound: BoundAxes) -> list[_Parts]:
        cached = self._targets.get(id(bound))
        if cached is None:
            blocks = bound.blocks if self.from_pt else tuple(b.inverse() for b in bound.blocks)
            per_target: list[list[Block]] = [[] for _ in (bound.right if self.from_pt else bound.left)]
            for block in blocks:
                per_target[block.right.tensor].append(block)
            cached = bound, [_localised(own) for own in per_target]
            self._targets[id(bound)] = cached
        return cached[1]

    def _target_dtype(
        self, entry: Entry, name: str, sources: Sequence[TensorSource], scales: Sequence[Scale | None]
    ) -> DType:
        forced = entry.dtype_ms if self.from_pt else entry.dtype_pt
        found = {s.spec.dtype for s in sources}
        if forced and forced != "keep":
            target = dtype_named(forced)
        elif any(scales):
            target = self.cast or BY_NAME["bfloat16"]
        elif self.cast is not None and forced != "keep" and all(d.floating for d in found):
            target = self.cast
        elif len(found) == 1:
            target = next(iter(found))
        else:
            raise DTypeError(
                f"'{name}' would be made of tensors of different dtypes: "
                + ", ".join(f"'{s.spec.name}' is {s.spec.dtype}" for s in sources[:3])
                + ".",
                remedy="Cast them to one type with --dtype.",
                tensor=name,
                rule=entry.rule,
            )
        for source, scale in zip(sources, scales or [None] * len(sources), strict=True):
            if scale is None:
                check_cast(source.spec.dtype, target, tensor=name, rule=entry.rule)
        return target

    # --- block-quantised sources ---

    def _scales(self, sources: Sequence[TensorSource]) -> tuple[Scale | None, ...]:
        fp8 = self.known.expansion.table.fp8
        if fp8 is None or not self.from_pt or self.request.keep_quantized:
            return ()
        scales = tuple(self._scale(source, fp8) for source in sources)
        return scales if any(scales) else ()

    def _scale(self, source: TensorSource, fp8: Fp8) -> Scale | None:
        if source.spec.dtype.name != "float8_e4m3fn":
            return None
        name = source.spec.name + fp8.suffix
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CoverageError(
                f"'{source.spec.name}' is float8_e4m3fn, and its scale '{name}' is missing.",
                remedy="Give the whole checkpoint: without its scale the weight cannot be dequantised.",
                tensor=source.spec.name,
                file=self.known.inventory.path,
            )
        rows, columns = self._block_size()
        shape = source.spec.shape
        if len(shape) != 2 or tensor.spec.shape != (-(-shape[0] // rows), -(-shape[1] // columns)):
            raise ShapeError(
                f"The scale '{name}' has the shape {list(tensor.spec.shape)}, which does not cover "
                f"{list(shape)} in blocks of {rows} x {columns}.",
                remedy="Check quantization_config.weight_block_size in the config.",
                tensor=name,
            )
        if tensor.spec.dtype.name not in ("float32", "bfloat16", "float16", "float8_e8m0fnu"):
            raise DTypeError(
                f"The scale '{name}' has the dtype {tensor.spec.dtype}.", remedy="It should be float32.", tensor=name
            )
        self.consumed.add(name)
        self.dequantised = True
        return Scale(tensor, rows, columns)

    def _block_size(self) -> tuple[int, int]:
        block = self.known.expansion.fp8_block
        if block is None:
            raise ConfigError(
                "The source holds float8_e4m3fn weights, and the config does not give their block size.",
                remedy="Give a config with quantization_config.weight_block_size, such as [128, 128].",
                file=self.known.inventory.path,
            )
        return block

    def _carry_scales(self, entry: Entry, found: Sequence[Record]) -> list[Record]:
        """The scales of quantised words that stay as they are, under the names of their weights."""
        fp8 = self.known.expansion.table.fp8
        if fp8 is None:
            return []
        carried = []
        for record in found:
            for source in record.sources:
                scale = self.tensors.get(source.spec.name + fp8.suffix)
                if source.spec.dtype.name != "float8_e4m3fn" or scale is None or record.spec.dtype != source.spec.dtype:
                    continue
                if record.axes:
                    raise DTypeError(
                        f"'{source.spec.name}' is quantised in blocks, and '{record.spec.name}' rearranges them: "
                        "the scales cannot follow.",
                        remedy="Leave --keep-quantized out, or choose a target that keeps the rows (hf, flat).",
                        tensor=source.spec.name,
                        rule=entry.rule,
                    )
                self.consumed.add(scale.spec.name)
                renamed = replace(identity(scale), rule=str(entry.rule))
                spec = TensorSpec(record.spec.name + fp8.suffix, scale.spec.dtype, scale.spec.shape)
                carried.append(replace(renamed, spec=spec))
        return carried

    # --- what is left ---

    def _scalars(self) -> None:
        self.dropped += [Dropped(name, "training state, not a weight") for name in self.known.inventory.scalars]

    def _unexpected(self) -> list[str]:
        """The tensors that the table does not name and no pattern lets be left out."""
        refused = []
        self._left = [name for name in self.tensors if name not in self.consumed]
        for name in self._left:
            pattern = _matches(name, self.request.allow_unexpected)
            if not pattern:
                refused.append(name)
                continue
            by = f"--allow-unexpected '{pattern}'"
            self.dropped.append(Dropped(name, f"allowed by {by}"))
            self._allowed.setdefault(("left out", by), []).append(name)
        return refused

    @property
    def allowed(self) -> tuple[Allowed, ...]:
        """What is absent or left out because something allows it, by what does."""
        return tuple(Allowed(kind, by, tuple(names)) for (kind, by), names in self._allowed.items())

    def unmatched(self) -> list[str]:
        """A note for each pattern that allowed nothing: it may be misspelt."""
        given = (
            ("--allow-missing", self.request.allow_missing, self._gone, "missing"),
            ("--allow-unexpected", self.request.allow_unexpected, self._left, "unexpected"),
        )
        return [
            f"{option} '{pattern}' matched no {what} tensor."
            for option, patterns, names, what in given
            for pattern in patterns
            if not any(fnmatchcase(name, pattern) for name in names)
        ]


def _localised(blocks: Sequence[Block]) -> _Parts:
    """The sources that blocks use, in order, and the blocks renumbered over them."""
    used = sorted({block.left.tensor for block in blocks})
    place = {tensor: k for k, tensor in enumerate(used)}
    if used == list(range(len(used))):
        return tuple(used), tuple(blocks)
    moved = []
    for block in blocks:
        view = block.left
        moved.append(Block(block.sizes, type(view)(place[view.tensor], view.start, view.axes), block.right))
    return tuple(used), tuple(moved)


def _matches(name: str, globs: Iterable[str]) -> str:
    """The first glob that matches, or an empty string."""
    return next((pattern for pattern in globs if fnmatchcase(name, pattern)), "")


def _coverage_error(matcher: Matcher, unexpected: Sequence[str]) -> CoverageError:
    """Everything missing and unexpected in one message, ended by the fewest words that mend it."""
    lines = []
    remedies = []
    source = "PyTorch" if matcher.from_pt else "MindSpore"
    if matcher.missing:
        names = [name for name, _ in matcher.missing]
        rule = matcher.missing[0][1].rule
        lines.append(f"{len(names)} tensor(s) of the {source} side are missing: {_listed(names)} (first by {rule}).")
        remedies.append(
            _promised(matcher) or f"--allow-missing '{_glob(names)}' if the checkpoint is meant to lack them"
        )
    if unexpected:
        lines.append(f"{len(unexpected)} tensor(s) are not named by the table: {_listed(unexpected)}.")
        remedies.append(
            f"--allow-unexpected '{_glob(unexpected)}' to leave them out, or rules in a table of your own (--mapping)"
        )
    back = _reversed(matcher, unexpected)
    if back:
        lines.insert(0, "The source's names are those of the table's other side.")
    return CoverageError(
        " ".join(lines),
        remedy=f"Use 'ckptbridge convert {back}'." if back else "; ".join(remedies) + ".",
        file=matcher.known.inventory.path,
        table=matcher.known.expansion.table.name,
        tensor=(matcher.missing[0][0] if matcher.missing else unexpected[0]),
        missing=len(matcher.missing) or None,
        unexpected=len(unexpected) or None,
    )


def _glob(names: Sequence[str]) -> str:
    """One glob for names: the name itself, or the components that all share."""
    if len(names) == 1:
        return glob.escape(names[0])
    shared: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(glob.escape(parts[0]))
    return ".".join([*shared, "*"]) if shared else glob.escape(names[0])


def _promised(matcher: Matcher) -> str:
    """The config value to set to 0, when just what one index runs over is missing, and all of it.

    So it is with multi-token prediction layers: transformers drops them on saving and keeps their number.
    """
    missing = {id(entry) for _, entry in matcher.missing}
    config = matcher.known.config or {}
    table = matcher.known.expansion.table
    for index, expression in table.index.items():
        own = {id(e) for e in matcher.known.expansion.entries if index in e.at and e.kind == "map" and not e.optional}
        keys = [name for name in expression.names if isinstance(config.get(name), int)]
        if own and own == missing and len(keys) == 1:
            return f"set {keys[0]} to 0 in the config (--config) if the checkpoint is meant to lack what it counts"
    return ""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{n}'" for n in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _reversed(matcher: Matcher, unexpected: Sequence[str]) -> Direction | None:
    """The other direction, when more of the names fit it than fit this one."""
    if not unexpected:
        return None
    expansion = matcher.known.expansion
    fitting = len(matcher.tensors) - len(unexpected)
    return other_direction(
        matcher.known.direction, expansion.table, expansion.config, expansion.layout, matcher.tensors, fitting
    )
