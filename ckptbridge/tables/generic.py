"""Any PyTorch network to one of ``mindspore.nn`` layers, from the names and shapes of its tensors alone.

``mindspore.nn`` calls the parameters of a norm gamma and beta, its statistics moving_mean and moving_variance,
an embedding's matrix embedding_table and a PReLU's slope w, and keeps the kernel of a one-dimensional convolution as
a two-dimensional one of height 1. Dense, convolution, recurrent and attention layers have torch's names, shapes and
gate order (measured with mindspore 2.10.0). A state dict has no layer types, so a layer is known by what
stands beside its weight; what can be read in two ways is an error that shows the option to give.

The entries are those of a mapping table: proof and conversion take them as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ckptbridge.tables.axes import bind_axes, parse_axes
from ckptbridge.tables.expand import Entry, Expansion, Form, Side
from ckptbridge.tables.generic_options import OPTIONS, Doubt, Options, listed, refuse
from ckptbridge.tables.names import parse_template
from ckptbridge.tables.rules import Rule
from ckptbridge.tables.table import Table

FAMILY = "torch-nn"
TARGET = "nn"

Shape = tuple[int, ...]

# What a tensor is -> its name on either side, and its axes where they differ. {m} is the module with its dot.
_KINDS: dict[str, tuple[str, str, str]] = {
    "as it is": ("{m}{n}", "{m}{n}", ""),
    "norm weight": ("{m}weight", "{m}gamma", ""),
    "norm bias": ("{m}bias", "{m}beta", ""),
    "running mean": ("{m}running_mean", "{m}moving_mean", ""),
    "running variance": ("{m}running_var", "{m}moving_variance", ""),
    "3-D norm weight": ("{m}weight", "{m}bn2d.gamma", ""),
    "3-D norm bias": ("{m}bias", "{m}bn2d.beta", ""),
    "3-D running mean": ("{m}running_mean", "{m}bn2d.moving_mean", ""),
    "3-D running variance": ("{m}running_var", "{m}bn2d.moving_variance", ""),
    "embedding": ("{m}weight", "{m}embedding_table", ""),
    "PReLU slope": ("{m}weight", "{m}w", ""),
    "1-D convolution": ("{m}weight", "{m}weight", "o i k -> o i 1 k"),
}
_BATCH_NORM = {
    "weight": "norm weight",
    "bias": "norm bias",
    "running_mean": "running mean",
    "running_var": "running variance",
}
_STATISTICS = {
    "gamma": "norm weight",
    "beta": "norm bias",
    "moving_mean": "running mean",
    "moving_variance": "running variance",
}
_COUNTER = "num_batches_tracked"
_WHY = "the number of training batches seen: mindspore.nn keeps none, and torch starts at 0 without it"


def _rule(number: int, pt: str, ms: str, axes: str, drop: str = "") -> Rule:
    line = parse_axes(axes) if axes else None
    return Rule(number, f"{FAMILY}.{TARGET}", (pt,), (ms,) if ms else (), line, None, False, drop, "", "", "")


_RULES = {kind: _rule(k, *fields) for k, (kind, fields) in enumerate(_KINDS.items(), 1)}
_DROP = _rule(len(_RULES) + 1, "{m}" + _COUNTER, "", "", _WHY)

TABLE = Table(
    family=FAMILY,
    model_types=(),
    target=TARGET,
    default=False,
    summary="Any network of torch.nn layers to mindspore.nn, layers told apart by names and shapes",
    index={},
    sizes={},
    layout={},
    strings={},
    roots={},
    defaults={},
    fp8=None,
    rules=(*_RULES.values(), _DROP),
    path=Path(f"{FAMILY}.{TARGET}"),
    digest="sha256:" + hashlib.sha256(repr((_KINDS, _COUNTER, _WHY, sorted(OPTIONS))).encode()).hexdigest(),
)
"""What the entries follow, in the form of a mapping table. It has no index: :func:`expand_generic` expands it."""


@dataclass(frozen=True)
class _Module:
    """The tensors that belong to one module itself: last component of the name -> shape."""

    path: str  # "" for the network itself
    own: Mapping[str, Shape]


def expand_generic(side: Side, shapes: Mapping[str, Shape], options: Mapping[str, str] | None = None) -> Expansion:
    """The entries for a checkpoint whose tensors on ``side`` ("pt" or "ms") have these names and shapes.

    ``options`` are those of :data:`ckptbridge.tables.generic_options.OPTIONS`. ``layout`` of the result says how
    every doubt was settled, so that it reads the other side without asking. Raises UsageError for an
    unknown option or one that fits no module, and CoverageError, showing the options to give, for what can be
    read in two ways.
    """
    modules = _modules(shapes)
    chosen = Options.parse(options or {}, [module.path for module in modules])
    entries, layout, doubts = _read(side, modules, chosen)
    refuse(doubts, side)
    refuse(_not_returning(side, entries, layout), side)
    by_pt = {name: entry for entry in reversed(entries) for name in entry.pt}
    by_ms = {name: entry for entry in reversed(entries) for name in entry.ms}
    return Expansion(TABLE, {}, layout, {}, {}, {}, tuple(entries), by_pt, by_ms, None)


def _read(side: Side, modules: list[_Module], chosen: Options) -> tuple[list[Entry], dict[str, str], list[Doubt]]:
    """The entries, the options that settle the same for either side, and what is in doubt."""
    read = _from_torch if side == "pt" else _from_mindspore
    # Only a network with three-dimensional convolutions has batch norms over three dimensions.
    spatial = any(len(module.own.get("weight", ())) == 5 for module in modules)
    doubts: list[Doubt] = []
    entries: list[Entry] = []
    settled: dict[str, dict[str, None]] = {option: {} for option in OPTIONS}
    for module in modules:
        for path, name, kind, option in read(module, chosen, spatial, doubts):
            entries.append(_entry(side, path, name, kind, module.own[name]))
            if option:
                settled[option][path] = None
    return entries, {option: listed(paths) for option, paths in settled.items()}, doubts


def _not_returning(side: Side, entries: list[Entry], layout: Mapping[str, str]) -> list[Doubt]:
    """Modules whose tensors would not come back under their names when the other side is read."""
    mapped = [entry for entry in entries if entry.kind == "map"]
    other: Side = "ms" if side == "pt" else "pt"
    modules = _modules(dict(_tensor(other, entry) for entry in mapped))
    again, _, doubts = _read(other, modules, Options.parse(layout, [module.path for module in modules]))
    pairs = {(entry.pt, entry.ms) for entry in again}
    lost = [_tensor(side, entry)[0] for entry in mapped if (entry.pt, entry.ms) not in pairs]
    return [
        *(Doubt("no return", name.rpartition(".")[0]) for name in lost),
        *(Doubt("no return", doubt.path) for doubt in doubts),
    ]


def _modules(shapes: Mapping[str, Shape]) -> list[_Module]:
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        path, _, last = name.rpartition(".")
        found.setdefault(path, {})[last] = tuple(shape)
    return [_Module(path, own) for path, own in found.items()]


# --- what a tensor is ------------------------------------------------------------------------

# (path on the PyTorch side, name on the side that is read, kind, option that settles it on the other side)
_Found = tuple[str, str, str, str]


def _from_torch(module: _Module, chosen: Options, spatial: bool, doubts: list[Doubt]) -> Iterator[_Found]:
    """Each tensor of a PyTorch module with what it is."""
    path, own = module.path, module.own
    if chosen.has("keep", path):
        yield from ((path, name, "as it is", "keep") for name in own)
        return
    if {"weight_g", "weight_v"} <= own.keys():
        doubts.append(Doubt("weight norm", path))
    kinds: dict[str, tuple[str, str]] = {}
    if "running_mean" in own or "running_var" in own:
        kinds = _batch_norm(path, chosen, spatial, doubts)
    elif "weight" in own:
        kinds = _weight(module, chosen, doubts)
    for name in own:
        if name == _COUNTER:
            yield path, name, "drop", ""
            continue
        kind, option = kinds.get(name, ("as it is", ""))
        yield path, name, kind, option


def _batch_norm(path: str, chosen: Options, spatial: bool, doubts: list[Doubt]) -> dict[str, tuple[str, str]]:
    """Batch norm is known by its running statistics, and one over three dimensions by what the user says."""
    if spatial and not chosen.given("batch_norm_3d"):
        doubts.append(Doubt("batch norm", path))
    if not chosen.has("batch_norm_3d", path):
        return {name: (kind, "") for name, kind in _BATCH_NORM.items()}
    return {name: (f"3-D {kind}", "batch_norm_3d") for name, kind in _BATCH_NORM.items()}


def _weight(module: _Module, chosen: Options, doubts: list[Doubt]) -> dict[str, tuple[str, str]]:
    """A module with a weight and no statistics: by rank, and by the bias beside it."""
    path, weight, bias = module.path, module.own["weight"], module.own.get("bias")
    fits = {
        "embedding": len(weight) == 2 and bias is None,
        "norm": bias == weight or (len(weight) == 1 and bias is None),
        "prelu": len(weight) == 1 and bias is None,
        "conv1d": len(weight) == 3,
    }
    named = [option for option in fits if chosen.has(option, path) and fits[option]]
    unfit = [option for option in fits if chosen.spells(option, path) and not fits[option]]
    if unfit or len(named) > 1:
        doubts.append(Doubt("contradiction", path, ", ".join(unfit or named)))
    elif "norm" in named or (weight and bias == weight):
        return {"weight": ("norm weight", "norm" if bias is None else ""), "bias": ("norm bias", "")}
    elif "embedding" in named:
        return {"weight": ("embedding", "embedding")}
    elif "prelu" in named:
        return {"weight": ("PReLU slope", "prelu")}
    elif "conv1d" in named or (fits["conv1d"] and not chosen.given("conv1d")):
        return {"weight": ("1-D convolution", "conv1d")}
    elif fits["prelu"]:
        doubts.append(Doubt("vector", path))
    elif fits["embedding"] and not chosen.given("embedding"):
        doubts.append(Doubt("matrix", path))
    return {}


def _from_mindspore(module: _Module, chosen: Options, spatial: bool, doubts: list[Doubt]) -> Iterator[_Found]:
    """Each tensor of a mindspore.nn module with what it is; the path is the one on the PyTorch side."""
    path, own = module.path, module.own
    if chosen.has("keep", path):
        yield from ((path, name, "as it is", "keep") for name in own)
        return
    kinds: dict[str, tuple[str, str]] = {}
    if "moving_mean" in own or "moving_variance" in own:
        owner, _, last = path.rpartition(".")
        three = last == "bn2d" and chosen.has("batch_norm_3d", owner)
        if last == "bn2d" and not chosen.given("batch_norm_3d"):
            doubts.append(Doubt("bn2d", owner))
        kinds = {name: (kind, "") for name, kind in _STATISTICS.items()}
        if three:
            path = owner
            kinds = {name: (f"3-D {kind}", "batch_norm_3d") for name, kind in _STATISTICS.items()}
    elif {"gamma", "beta"} <= own.keys():
        kinds = {"gamma": ("norm weight", ""), "beta": ("norm bias", "")}
    elif "gamma" in own and chosen.has("norm", path):
        kinds = {"gamma": ("norm weight", "norm")}
    if "embedding_table" in own:
        kinds["embedding_table"] = ("embedding", "embedding")
    if len(own.get("w", ())) == 1:
        if chosen.has("prelu", path):
            kinds["w"] = ("PReLU slope", "prelu")
        elif not chosen.given("prelu"):
            doubts.append(Doubt("slope", path))
    weight = own.get("weight", ())
    if len(weight) == 4 and weight[2] == 1:
        if chosen.has("conv1d", path):
            kinds["weight"] = ("1-D convolution", "conv1d")
        elif not chosen.given("conv1d"):
            doubts.append(Doubt("flat kernel", path))
    for name in own:
        kind, option = kinds.get(name, ("as it is", ""))
        yield path, name, kind, option


def _tensor(side: Side, entry: Entry) -> tuple[str, Shape]:
    """Name and shape of an entry's one tensor on a side."""
    names, shapes = (entry.pt, entry.pt_shapes) if side == "pt" else (entry.ms, entry.ms_shapes)
    return names[0], (shapes or ((),))[0]


# --- entries ---------------------------------------------------------------------------------


def _entry(side: Side, path: str, name: str, kind: str, shape: Shape) -> Entry:
    values = {"m": f"{path}." if path else "", "n": name}
    if kind == "drop":
        return Entry(_DROP, {}, "drop", (_written(_DROP.pt[0], values),), (), _form(len(shape), shape, "", side))
    rule = _RULES[kind]
    pt, ms, axes = _KINDS[kind]
    return Entry(
        rule, {}, "map", (_written(pt, values),), (_written(ms, values),), _form(len(shape), shape, axes, side)
    )


def _written(template: str, values: Mapping[str, str]) -> str:
    return parse_template(template).render(lambda name: values[name])


@lru_cache(maxsize=4096)
def _form(rank: int, shape: Shape, axes: str, side: Side) -> Form:
    """The axes with their lengths: given, or one for each dimension."""
    line = parse_axes(axes or " ".join(f"d{k}" for k in range(rank)) or "()")
    if axes:
        real = shape if side == "pt" else (*shape[:2], *shape[3:])
        lengths = dict(zip(("o", "i", "k"), real, strict=True))
    else:
        lengths = {f"d{k}": length for k, length in enumerate(shape)}
    return Form(line, lengths, frozenset(), frozenset(), bind_axes(line, lengths))
