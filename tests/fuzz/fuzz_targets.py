"""What is fuzzed: each target takes bytes that nobody vouches for, and lets nothing out but the error family.

Where something is accepted, more must hold: our readers agree with the real library or with our own writer, and an axis
line moves every element there and back.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
import safetensors as library

from ckptbridge.conversion import provenance
from ckptbridge.conversion.planner import make_plan
from ckptbridge.conversion.request import Request
from ckptbridge.errors import CkptBridgeError
from ckptbridge.formats import detect, mindspore_ckpt, torch_bin
from ckptbridge.formats import safetensors as reader
from ckptbridge.formats.tensors import Inventory, TensorSource
from ckptbridge.tables.axes import bind_axes, parse_axes
from ckptbridge.tables.expand import expand
from ckptbridge.tables.expressions import ABSENT, parse_expression
from ckptbridge.tables.names import parse_template
from ckptbridge.tables.proof import prove
from ckptbridge.tables.table import load_table

Target = Callable[[bytes], None]


@functools.lru_cache(maxsize=1)
def folder() -> Path:
    """A folder of this process, in memory where that is possible."""
    shared = "/dev/shm" if "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK) else None
    made = tempfile.TemporaryDirectory(prefix="ckptbridge-fuzz-", dir=shared)
    atexit.register(made.cleanup)
    return Path(made.name)


def file_of(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


# --- readers ---------------------------------------------------------------------------------


def check_places(inventory: Inventory, size: int) -> None:
    """Every element of every tensor lies in the file."""
    for tensor in [*inventory.tensors.values(), *inventory.scalars.values()]:
        total = 0
        for segment in tensor.segments:
            assert segment.offset >= 0
            assert segment.offset + segment.nbytes <= size
            total += segment.nbytes
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.spec.shape, tensor.element_strides, strict=True))
        if tensor.spec.numel:
            assert tensor.offset >= 0
            assert (last + 1) * tensor.spec.dtype.itemsize <= total


def content(tensor: TensorSource, data: bytes) -> bytes:
    return b"".join(data[s.offset : s.offset + s.nbytes] for s in tensor.segments)


def written(module: ModuleType, tensors: Mapping[str, TensorSource], strings: Mapping[str, str], data: bytes) -> bytes:
    """The tensors in a file of our own making."""
    layout = module.layout([t.spec for t in tensors.values()], strings)
    made = bytearray(layout.size)
    runs = [*layout.fixed, *module.seal(layout, strings, None)]
    for tensor, places in zip(tensors.values(), layout.places, strict=True):
        stored = content(tensor, data)
        runs += [(p.offset, stored[p.start : p.start + p.nbytes]) for p in places]
    for offset, run in runs:
        made[offset : offset + len(run)] = run
    return bytes(made)


def safetensors(data: bytes) -> None:
    """The reader takes only what the library takes, and finds the same; and the writer's file reads the same."""
    try:
        inventory = reader.read(file_of("x.safetensors", data))
    except CkptBridgeError:
        return
    check_places(inventory, len(data))
    theirs = dict(library.deserialize(data))
    assert theirs.keys() == inventory.tensors.keys()
    for name, tensor in inventory.tensors.items():
        assert theirs[name]["dtype"] == tensor.spec.dtype.safetensors
        assert tuple(theirs[name]["shape"]) == tensor.spec.shape
        assert bytes(theirs[name]["data"]) == content(tensor, data)
    again = written(reader, inventory.tensors, inventory.strings, data)
    assert {n: t["data"] for n, t in library.deserialize(again)} == {n: t["data"] for n, t in theirs.items()}


def ckpt(data: bytes) -> None:
    """What the reader takes, the writer can write, and it reads the same."""
    path = file_of("x.ckpt", data)
    try:
        inventory = mindspore_ckpt.read(path)
    except CkptBridgeError:
        return
    for checksum in mindspore_ckpt.checksums(path):
        assert checksum.offset + checksum.nbytes <= len(data)
    check_places(inventory, len(data))
    tensors = {**inventory.tensors, **inventory.scalars}
    strings = inventory.strings or {"a string, as": "conversions put one last"}
    if not tensors.keys().isdisjoint(strings):
        return
    again = written(mindspore_ckpt, tensors, strings, data)
    found = mindspore_ckpt.read(file_of("y.ckpt", again))
    assert found.strings == strings
    both = {**found.tensors, **found.scalars}
    assert both.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert both[name].spec == tensor.spec
        assert content(both[name], again) == content(tensor, data)


def torch_file(data: bytes) -> None:
    """A whole .bin, zip or older."""
    with suppress(CkptBridgeError):
        check_places(torch_bin.read(file_of("x.bin", data)), len(data))


def torch_pickle(data: bytes) -> None:
    """The pickle alone, in a zip that is in order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/data/0", bytes(64))
    torch_file(buffer.getvalue())


def index(data: bytes) -> None:
    """An index beside two shards."""
    place = folder() / "sharded"
    if not place.exists():
        place.mkdir()
        for name in ("one", "two"):
            (place / f"{name}.safetensors").write_bytes(safetensors_seeds()[0].replace(b'"a"', f'"{name[0]}"'.encode()))
    (place / "model.safetensors.index.json").write_bytes(data)
    with suppress(CkptBridgeError):
        detect.open_inventory(place)


# --- tables ----------------------------------------------------------------------------------

CONFIG = {"layers": 2, "experts": 3, "hidden": 7, "ffn": 10, "first": 1, "nested": {"list": [4, 5]}}


def table(data: bytes) -> None:
    """A whole table, with its proof."""
    with suppress(CkptBridgeError):
        prove(expand(load_table(file_of("x.toml", data)), CONFIG))


def axes(data: bytes) -> None:
    """A line that is accepted moves every element there, and its inverse back."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        line = parse_axes(text)
        lengths = {name: 1 + k % 3 for k, name in enumerate(sorted(line.names))}
        bound = bind_axes(line, lengths)
        back = bind_axes(line.inverse(), lengths)
    except CkptBridgeError:
        return
    again = line.inverse().inverse()  # but for spaces around the arrow
    assert (again.left, again.right) == (line.left, line.right)
    assert (back.left, back.right) == (bound.right, bound.left)
    numel = sum(prod(shape) for shape in bound.left)
    if numel > 10_000 or len(bound.blocks) > 1000:
        return
    there = [np.full(prod(shape), -1) for shape in bound.right]
    ends = np.cumsum([0, *(prod(shape) for shape in bound.left)])
    for block in bound.blocks:
        source, target = indices(block.sizes, block.left, bound.left), indices(block.sizes, block.right, bound.right)
        assert (there[block.right.tensor][target] == -1).all()
        there[block.right.tensor][target] = source + ends[block.left.tensor]
    assert sorted(np.concatenate(there).tolist()) == list(range(numel)) if there else numel == 0


def indices(sizes: tuple[int, ...], view: object, shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The flat elements of a tensor in which a block lies, by the definition of a view."""
    shape = shapes[view.tensor]  # type: ignore[attr-defined]
    at = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), int)
    coordinates = [np.full(at.shape[1], start) for start in view.start]  # type: ignore[attr-defined]
    for k, (dim, step) in enumerate(view.axes):  # type: ignore[attr-defined]
        coordinates[dim] = coordinates[dim] + at[k] * step
    return np.ravel_multi_index(coordinates, shape) if shape else np.zeros(at.shape[1], int)


def expressions(data: bytes) -> None:
    """An expression over a config, and a name template."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(CkptBridgeError):
        parse_expression(text).evaluate(known)
    with suppress(CkptBridgeError):
        parse_template(text).render(known)


def known(name: str) -> object:
    return CONFIG.get(name, ABSENT)


# --- provenance ------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def converted() -> tuple[Mapping[str, TensorSource], bytes, str]:
    """A converted checkpoint: its tensors, its bytes, and its provenance."""
    config = {
        "model_type": "llama",
        "vocab_size": 5,
        "hidden_size": 4,
        "intermediate_size": 3,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 2,
    }
    source = folder() / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    layer = {"self_attn.q_proj": (4, 4), "self_attn.k_proj": (2, 4), "self_attn.v_proj": (2, 4)}
    layer |= {"self_attn.o_proj": (4, 4), "mlp.gate_proj": (3, 4), "mlp.up_proj": (3, 4), "mlp.down_proj": (4, 3)}
    layer |= {"input_layernorm": (4,), "post_attention_layernorm": (4,)}
    shapes = {"embed_tokens": (5, 4), "norm": (4,)} | {f"layers.0.{name}": shape for name, shape in layer.items()}
    from safetensors.numpy import save_file

    arrays = {f"model.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file({**arrays, "lm_head.weight": np.ones((5, 4), np.float32)}, source / "model.safetensors")
    from ckptbridge import convert

    made = folder() / "made.ckpt"
    convert(source, made, direction="pt2ms", provenance={"run": "42"})
    inventory = mindspore_ckpt.read(made)
    return inventory.tensors, made.read_bytes(), inventory.strings[provenance.TAG]


def record(data: bytes) -> None:
    """A record of any kind in a checkpoint: it is read, and a conversion is planned by what it says."""
    text = data.decode("utf-8", "replace")
    carried = provenance.parse(text)
    if carried is not None:
        provenance.dumps({"history": carried.history})
    tensors, stored, _ = converted()
    path = file_of("record.ckpt", written(mindspore_ckpt, tensors, {provenance.TAG: text}, stored))
    with suppress(CkptBridgeError):
        make_plan(Request(source=path, destination=folder() / "out", direction="ms2pt"))


# --- seeds -----------------------------------------------------------------------------------


def safetensors_seeds() -> list[bytes]:
    import torch
    from safetensors.numpy import save
    from safetensors.torch import save as torch_save

    some = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.zeros((0, 2), np.int64), "s": np.array(1.5)}
    return [
        save({"a": np.arange(4, dtype=np.float16)}),
        save(some, {"format": "pt", "append_info": "{}"}),
        torch_save({"x": torch.ones(2, dtype=torch.bfloat16)}),
    ]


def ckpt_seeds() -> list[bytes]:
    tensors, stored, text = converted()
    few = dict(list(tensors.items())[:2])
    plain = written(mindspore_ckpt, few, {}, stored)
    crc = mindspore_ckpt.crc_trailer(file_of("seed.ckpt", plain))
    return [plain, plain + crc, written(mindspore_ckpt, few, {"append_info": text[:40], "n": "é"}, stored)]


def torch_seeds() -> list[bytes]:
    import torch

    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    state["tied"] = state["a"]
    state["view"] = state["a"].t()[1:]
    found = []
    for value in (state, {"model": state, "optimizer": {"state": {}, "lr": 0.1}}, torch.nn.Linear(2, 1)):
        for zipped in (True, False):
            buffer = io.BytesIO()
            torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
            found.append(buffer.getvalue())
    return found


def pickle_seeds() -> list[bytes]:
    found = []
    for data in torch_seeds():
        if data.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                (name,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
                found.append(archive.read(name))
    return found


def index_seeds() -> list[bytes]:
    weight_map = {"o": "one.safetensors", "t": "two.safetensors"}
    return [
        json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}).encode(),
        json.dumps(weight_map).encode(),
    ]


TABLE = """schema = 1
family = "toy"
target = "there"
[index]
i = "layers"
e = "experts or 0"
[sizes]
h = "hidden"
f = "ffn // 2"
[layout]
mlp = ["a", "b"]
[roots.root]
choices = ["model.", ""]
pt = "{root}x"
[strings]
s = "y"
[defaults]
first = 0
[[rule]]
when = "i >= first and mlp == 'a'"
pt = ["{root}{i}.{e}.gate", "{root}{i}.{e}.up"]
ms = "{i}.w"
axes = "e f h, e f h -> (e h) (f + f)"
[[rule]]
pt = "{root}x"
axes = "h labels"
[[rule]]
pt = "{s}"
tied = "{root}x"
[[rule]]
pt = "z{nested.list[1]}"
drop = "none there"
"""


def table_seeds() -> list[bytes]:
    return [TABLE.encode()]


def axes_seeds() -> list[bytes]:
    lines = (
        "v h",
        "o i -> i o",
        "(n (1 + 1 + 1) d) h -> (n d) h, (n d) h, (n d) h",
        "i (o + o + o) -> o i, o i, o i",
        "(n 2 k) h -> (n k 2) h",
        "(n (p + v)) r -> (n p + n v) r",
        "o i k -> o i 1 k",
        "(g r d) h, (g 1 d) h, (g 1 d) h -> (g (r + 1 + 1) d) h",
    )
    return [line.encode() for line in lines]


def expression_seeds() -> list[bytes]:
    texts = (
        "hidden // layers if experts else 2 * (ffn - 1)",
        "first in [1, 2] and not nested.list[0] == 4",
        "nested.missing or 'a' < 'b' <= 'c'",
        "model.layers.{layers + 1}.{hidden}.w",
    )
    return [text.encode() for text in texts]


def record_seeds() -> list[bytes]:
    return [converted()[2].encode()]


TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "safetensors": (safetensors, safetensors_seeds),
    "ckpt": (ckpt, ckpt_seeds),
    "torch_file": (torch_file, torch_seeds),
    "torch_pickle": (torch_pickle, pickle_seeds),
    "index": (index, index_seeds),
    "table": (table, table_seeds),
    "axes": (axes, axes_seeds),
    "expressions": (expressions, expression_seeds),
    "provenance": (record, record_seeds),
}
