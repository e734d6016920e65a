"""Which reader takes a path: by content, never by suffix; and what is no checkpoint, by name and remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptbridge.errors import CkptBridgeError, FormatError, UnsupportedError, UsageError
from ckptbridge.formats import mindspore_ckpt, safetensors
from ckptbridge.formats.shards import MINDSPORE_INDEX, read_index, read_weight_map, shard_path
from ckptbridge.formats.sniff import CKPT, INDEX, SAFETENSORS, sniff
from ckptbridge.formats.tensors import Inventory, TensorSource
from ckptbridge.formats.wrappers import wrapper_prefix

# Pickles that training leaves beside the weights, and that are none.
_NO_WEIGHTS = (
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "random_states",
    "scaler",
    "sampler",
    "trainer_state",
)

# What MindSpore's optimizers put before a parameter's name.
_OPTIMIZER_STATE = (
    *("adam_m.", "adam_v.", "moment1.", "moment2.", "moments.", "moment.", "accum.", "stat."),
    *("exp_avg.", "exp_avg_sq.", "mean_square.", "mean_grad.", "inf_norm."),
)

# Only for what an error says; which reader takes a file is decided by its content.
_WEIGHT_SUFFIXES = (".safetensors", ".ckpt", ".bin", ".pt", ".pth")

_READABLE = "a safetensors, .ckpt or .bin file, or a directory that holds one, or an index with its shards"


def open_inventory(path: Path, key: str | None = None) -> Inventory:
    """The contents of a checkpoint file or directory, from its headers.

    A directory is taken by its index (``*.safetensors.index.json``, MindSpore's ``param_name_map.json``,
    ``*.bin.index.json``) or its single weights file; safetensors go before a ``.bin`` of the same directory, as in
    transformers, and a note says so. ``key`` chooses among a ``.bin``'s nested state dicts. ``module.`` and
    ``_orig_mod.`` are removed when all names begin with them.

    Raises UsageError when there is no such path or several checkpoints to choose from, UnsupportedError for what is
    recognised and cannot be converted as it is (shards of a distributed run, adapters, optimizer state, other
    formats), FormatError for what is damaged or not recognised.
    """
    try:
        there = path.exists()
    except PermissionError:
        raise FormatError("This user may not enter the directory.", remedy="Change its mode.", file=path) from None
    if not there:
        raise UsageError("There is no such file or directory.", remedy="Check the path.", file=path)
    inventory = _read_directory(path, key) if path.is_dir() else _read_file(path, key)
    _refuse_parts(inventory)
    return _without_wrapper(inventory)


# --- files -----------------------------------------------------------------------------------


def _read_file(path: Path, key: str | None) -> Inventory:
    if path.suffix == ".distcp":
        raise _distributed(path)
    kind = sniff(path)
    if kind == SAFETENSORS:
        return safetensors.read(path)
    if kind == CKPT:
        return mindspore_ckpt.read(path)
    if kind == INDEX:
        return read_index(path, partial(_read_shard, key=key))
    from ckptbridge.formats import torch_bin

    return torch_bin.read(path, key)


def _read_shard(path: Path, key: str | None) -> Inventory:
    if sniff(path) == INDEX:
        raise FormatError("An index names a JSON file as a shard.", remedy="Fetch the index again.", file=path)
    return _read_file(path, key)


# --- directories -----------------------------------------------------------------------------


def _read_directory(directory: Path, key: str | None) -> Inventory:
    # Hidden files are passed over: what this tool has not finished is named .ckptbridge-...
    try:
        entries = sorted(p for p in directory.iterdir() if not p.name.startswith("."))
    except PermissionError:
        raise FormatError("This user may not list the directory.", remedy="Change its mode.", file=directory) from None
    files = [p for p in entries if p.is_file()]
    names = {p.name for p in files}
    indexed = [n for n in sorted(names) if n.endswith(".safetensors.index.json") or n == MINDSPORE_INDEX]
    bin_index = [n for n in sorted(names) if n.endswith(".bin.index.json")]
    found: list[str] = []
    for group in (indexed[:1], ["model.safetensors"], bin_index[:1], ["pytorch_model.bin"]):
        found += [name for name in group if name in names]
    if found and "model.ckpt" in names:
        raise _ambiguous(directory, [found[0], "model.ckpt"])
    if found:
        inventory = _read_named(directory, found[0], indexed, key)
        others = [n for n in found[1:] if n.endswith((".bin", ".bin.index.json"))]
        if inventory.format == "safetensors" and others:
            note = f"'{others[0]}' is there too; the safetensors were taken, as transformers does."
            inventory = replace(inventory, notes=(*inventory.notes, note))
        return inventory
    if "model.ckpt" in names:
        return _read_file(directory / "model.ckpt", key)
    return _read_only_weights(directory, entries, files, key)


def _read_named(directory: Path, name: str, indexed: list[str], key: str | None) -> Inventory:
    if name in indexed:
        return safetensors.read_directory(directory, partial(_read_shard, key=key))
    if name.endswith(".bin.index.json"):
        from ckptbridge.formats import torch_bin

        index = directory / name
        for shard in sorted(set(read_weight_map(index).values())):
            sniff(shard_path(directory, shard, index))  # a pointer or a web page among the shards is named as such
        return torch_bin.read_directory(directory, key)
    return _read_file(directory / name, key)


def _read_only_weights(directory: Path, entries: list[Path], files: list[Path], key: str | None) -> Inventory:
    """The one weights file of a directory that has none of the usual names."""
    weights: list[Path] = []
    wrong: list[CkptBridgeError] = []
    for path in files:
        if path.name.startswith(_NO_WEIGHTS):
            continue
        try:
            kind = sniff(path)
        except CkptBridgeError as error:
            # Most files of a directory are no weights; only of those that look like some it is news.
            if isinstance(error, UnsupportedError) or path.suffix in _WEIGHT_SUFFIXES:
                wrong.append(error)
            continue
        if kind != INDEX:
            weights.append(path)
    # Before any of its files is taken for the whole: a part of a distributed run looks like a checkpoint.
    parts = _distributed_run(directory, entries)
    if parts is not None:
        raise parts
    names = {p.name for p in files}
    adapters = [p for p in weights if p.name.startswith("adapter_model")]
    if "adapter_config.json" in names and adapters == weights:
        raise _adapter(directory)
    for path in weights:
        if _part_of_several(path.name):
            raise FormatError(
                f"The file '{path.name}' is one of several shards, and there is no index of them.",
                remedy="Fetch the *.index.json that belongs to them.",
                file=directory,
            )
    if len(weights) == 1:
        return _read_file(weights[0], key)
    if weights:
        raise _ambiguous(directory, [p.name for p in weights])
    if wrong:
        raise wrong[0]
    below = [p.name for p in entries if p.is_dir()]
    raise FormatError(
        "The directory holds no weights.",
        remedy=f"Name {_READABLE}" + (f"; it has these directories: {_few(below)}." if below else "."),
        file=directory,
    )


def _part_of_several(name: str) -> bool:
    """Whether the name ends as in ``model-00001-of-00002.safetensors``, with more than one."""
    before, _, count = name.split(".")[0].rpartition("-of-")
    return bool(before) and before[-1].isdigit() and count.isdigit() and count.lstrip("0") not in ("", "1")


def _ambiguous(directory: Path, candidates: list[str]) -> UsageError:
    return UsageError(
        f"The directory holds several checkpoints: {_few(candidates)}.",
        remedy=f"Name the one to take, such as {directory / candidates[0]}",
        file=directory,
    )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


# --- parts of a checkpoint -------------------------------------------------------------------


def _distributed_run(directory: Path, entries: list[Path]) -> UnsupportedError | None:
    """What a distributed run left, when the directory is that."""
    names = [p.name for p in entries]
    if any(name.endswith(".distcp") for name in names) or (directory / ".metadata").is_file():
        return _distributed(directory)
    if "zero_to_fp32.py" in names or any(name.endswith("_optim_states.pt") for name in names):
        return UnsupportedError(
            "These are DeepSpeed ZeRO shards.",
            remedy="Join them first: python zero_to_fp32.py DIRECTORY OUTPUT (DeepSpeed put the script beside them).",
            file=directory,
        )
    if any(name.startswith("mp_rank_") for name in names):
        return UnsupportedError(
            "These are the ranks of a Megatron or DeepSpeed model-parallel run.",
            remedy="Join them with that framework's own tool, to a Hugging Face directory.",
            file=directory,
        )
    if sum(name.startswith("consolidated.") and name.endswith(".pth") for name in names) > 1:
        return UnsupportedError(
            "These are the model-parallel parts of Meta's own format (consolidated.00.pth, ...).",
            remedy="Use the model's Hugging Face directory.",
            file=directory,
        )
    ranks = [p for p in entries if p.is_dir() and p.name.startswith("rank_") and p.name[5:].isdigit()]
    if len(ranks) == 1:
        return UnsupportedError(
            f"This is the output of a MindSpore run, with its checkpoints in '{ranks[0].name}'.",
            remedy=f"If the run had one device, name the directory or a file in it: {ranks[0]}",
            file=directory,
        )
    if ranks:
        return UnsupportedError(
            f"These are the slices of a distributed MindSpore run ({_few(p.name for p in ranks)}).",
            remedy="Merge them first with mindspore.unified_safetensors or mindspore.transform_checkpoints and the "
            "run's strategy files; after a purely data-parallel run, name one rank's file.",
            file=directory,
        )
    return None


def _distributed(path: Path) -> UnsupportedError:
    return UnsupportedError(
        "These are shards of a torch.distributed checkpoint (FSDP).",
        remedy="Join them first: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY OUTPUT.pt",
        file=path,
    )


def _adapter(path: Path) -> UnsupportedError:
    return UnsupportedError(
        "This is an adapter (LoRA) without the model that it adapts.",
        remedy="Merge it into its base model first (peft: model.merge_and_unload()) and save that.",
        file=path,
    )


def _refuse_parts(inventory: Inventory) -> None:
    """Refuse what holds no model at all; a model with optimizer state beside it only gets a note elsewhere."""
    names = inventory.tensors.keys()
    if names and all(any(part.startswith(("lora_", "mindpet_delta_lora_")) for part in n.split(".")) for n in names):
        raise _adapter(inventory.path)
    if names and all(name.startswith(_OPTIMIZER_STATE) for name in names):
        raise UnsupportedError(
            "This is optimizer state, without the weights.",
            remedy="Name the checkpoint that holds the network's parameters.",
            file=inventory.path,
        )


# --- names -----------------------------------------------------------------------------------


def _without_wrapper(inventory: Inventory) -> Inventory:
    """Without the ``module.`` / ``_orig_mod.`` that wrappers put before every name; notes say what was found."""
    notes = list(inventory.notes)
    tensors, aliases = inventory.tensors, inventory.aliases
    prefix = wrapper_prefix(list(tensors))
    if prefix:
        cut = len(prefix)
        tensors = {n[cut:]: _renamed(t, n[cut:]) for n, t in tensors.items()}
        aliases = {a[cut:]: b[cut:] for a, b in aliases.items()}
        notes.append(f"The prefix '{prefix}', which all names had, was removed.")
    state = sorted(
        {p for n in tensors for p in _OPTIMIZER_STATE if n.startswith(p) and n.removeprefix(p) in tensors},
    )
    if state:
        globs = " ".join(f"--allow-unexpected '{p}*'" for p in state)
        notes.append(f"Optimizer state stands among the weights; to convert without it: {globs}")
    return replace(inventory, tensors=tensors, aliases=aliases, notes=tuple(notes))


def _renamed(tensor: TensorSource, name: str) -> TensorSource:
    return replace(tensor, spec=replace(tensor.spec, name=name))
