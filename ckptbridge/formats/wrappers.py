"""Where the weights are in what a ``.bin`` holds: a state dict, a wrapper around one, or a module.

Nothing is guessed: of several dicts of tensors none is taken before the user names it. What is set
aside is told in notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptbridge.errors import FormatError, UnsupportedError, printable
from ckptbridge.formats.pickle_objects import Stub
from ckptbridge.formats.torch_values import Tensor, Unusable, unusable_stub

MAX_DEPTH = 64
MAX_MODULES = 1_000_000
WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # DataParallel and DistributedDataParallel; torch.compile
_PACKED_MODULES = ("torch.ao.", "torch.nn.quantized", "torch.nn.intrinsic", "torch.jit")
ITSELF = "."  # --key for the outermost dict
_SHOWN = 12

_SAVE_WEIGHTS = "Save the weights with torch.save(model.state_dict(), FILE)."
_SAVE_STATE_DICT = "Load it where its classes are, and save the weights: torch.save(model.state_dict(), FILE)."


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dict of named tensors, or a pickled module, and how to get to it from the outermost object."""

    path: tuple[str, ...]
    value: object
    tensors: int
    only_scalars: bool

    @property
    def key(self) -> str:
        return ".".join(self.path) or ITSELF


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors found, by name, and what to tell the user."""

    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


def find_weights(root: object, key: str | None, file: Path) -> Weights:
    """The one dict of tensors, or module, in ``root``; with ``key`` the one at that dotted path.

    Raises FormatError when there are none, or several and no ``key`` (all are listed),
    UnsupportedError for what is recognised and is no set of weights (optimizer state, ZeRO and
    FSDP parts, quantized and sparse tensors).
    """
    _refuse_partitions(root, file)
    start = () if key is None or key == ITSELF else _resolve(root, key, file)
    value = _follow(root, start)
    here = None if key is None else _candidate(start, value)
    chosen = here or _only(list(_candidates(value, start, file)), value, file)
    notes: list[str] = []
    if chosen.path:
        notes.append(f"The weights are under '{_short(chosen.key)}'.")
        if isinstance(entries := _entries(root), dict):
            aside = [(str(k), v) for k, v in entries.items() if str(k) != chosen.path[0]]
            notes += _skipped("Beside them the file holds, unused", aside)
    if isinstance(chosen.value, Stub) and _is_module(chosen.value):
        tensors = _module_tensors(chosen.value, file, notes)
    else:
        tensors = _dict_tensors(chosen.value, file, notes)
    _refuse_placeholders(root, tensors, file)
    return Weights(tensors, tuple(notes))


def wrapper_prefix(names: Sequence[str]) -> str:
    """The ``module.`` and ``_orig_mod.`` prefixes, one or several, that every one of ``names`` has."""
    prefix = ""
    while names:
        longer = next((prefix + p for p in WRAPPER_PREFIXES if all(n.startswith(prefix + p) for n in names)), None)
        if longer is None or any(n == longer for n in names):
            break
        prefix = longer
    return prefix


# --- the search ------------------------------------------------------------------------------


def _entries(value: object) -> dict[object, object] | list[object] | tuple[object, ...] | None:
    """The entries of a container, also of an unknown class that is one; None for anything else."""
    if isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, Stub):
        return value.items if value.items is not None else value.elements
    return None


def _children(value: object) -> Iterator[tuple[str, object]]:
    entries = _entries(value)
    pairs: Iterable[tuple[object, object]]
    pairs = entries.items() if isinstance(entries, dict) else enumerate(entries or ())
    for key, child in pairs:
        if isinstance(key, (str, int)):
            yield str(key), child


def _is_module(value: object) -> bool:
    state = value.state if isinstance(value, Stub) else None
    return isinstance(state, dict) and "_parameters" in state and "_modules" in state


def _is_optimizer(value: object) -> bool:
    entries = _entries(value)
    return isinstance(entries, dict) and "state" in entries and "param_groups" in entries


def _is_tensor(value: object) -> bool:
    return isinstance(value, (Tensor, Unusable)) or unusable_stub(value) is not None


def _candidate(path: tuple[str, ...], value: object) -> Candidate | None:
    if _is_module(value):
        return Candidate(path, value, 0, False)
    entries = _entries(value)
    if not isinstance(entries, dict):
        return None
    tensors = [v for k, v in entries.items() if isinstance(k, str) and _is_tensor(v)]
    if not tensors:
        return None
    return Candidate(path, value, len(tensors), all(isinstance(t, Tensor) and not t.shape for t in tensors))


def _candidates(start: object, path: tuple[str, ...], file: Path) -> Iterator[Candidate]:
    """Every dict of tensors and every module at or below ``start``, in file order, each object once.

    Optimizer state, and what a state dict keeps under ``..._extra_state``, is passed over.
    """
    stack: list[tuple[tuple[str, ...], object]] = [(path, start)]
    seen: set[int] = set()
    while stack:
        path, value = stack.pop()
        if id(value) in seen or _is_optimizer(value):
            continue
        seen.add(id(value))
        if len(path) > MAX_DEPTH:
            raise FormatError(f"Containers are nested more than {MAX_DEPTH} deep.", remedy=_SAVE_WEIGHTS, file=file)
        found = _candidate(path, value)
        if found is not None:
            yield found
        if not _is_module(value):
            children = [
                ((*path, key), child)
                for key, child in _children(value)
                if _entries(child) is not None or _is_module(child)
                if not key.endswith("_extra_state") and not key.lower().startswith("optim")
            ]
            stack.extend(reversed(children))


def _only(found: list[Candidate], value: object, file: Path) -> Candidate:
    # Counters and schedules are kept as scalars: a dict of nothing else is no rival of a real one.
    found = [c for c in found if not c.only_scalars] or found
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(
            f"'{_short(c.key)}' ({'a module' if not c.tensors else _tensors(c.tensors)})" for c in found[:_SHOWN]
        )
        raise FormatError(
            f"The file holds {len(found)} sets of tensors: {shown}{' ...' if len(found) > _SHOWN else ''}.",
            remedy=f"Choose one with --key NAME, for example --key {found[0].key}.",
            file=file,
            keys=" ".join(c.key for c in found[:_SHOWN]),
        )
    if isinstance(value, (Tensor, Unusable)):
        raise FormatError(
            "The file holds one tensor without a name.",
            remedy='Save it as torch.save({"NAME": tensor}, FILE).',
            file=file,
        )
    if any(isinstance(v, Stub) and v.callee.module.startswith("numpy") for _, v in _children(value)):
        raise FormatError(
            "The file holds NumPy values and no tensors.",
            remedy="Save torch.from_numpy(array) instead of each array.",
            file=file,
        )
    if _is_optimizer(value) or any(_is_optimizer(v) or k.lower().startswith("optim") for k, v in _children(value)):
        raise UnsupportedError(
            "The file holds the state of an optimizer and no weights.",
            remedy="Name the file with the model's state dict; optimizer state is not converted.",
            file=file,
        )
    raise FormatError(
        "The file holds no tensors by name.",
        remedy=_SAVE_WEIGHTS,
        file=file,
    )


def _resolve(root: object, key: str, file: Path) -> tuple[str, ...]:
    """The path that the dotted ``key`` names; keys with dots in them are found too."""
    path: tuple[str, ...] = ()
    value, rest = root, key
    while rest:
        children = dict(_children(value))
        name = max((k for k in children if rest == k or rest.startswith(f"{k}.")), key=len, default=None)
        if name is None:
            names = list(children)
            shown = ", ".join(f"'{_short(n)}'" for n in names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
            raise FormatError(
                f"There is no entry '{key}' in the file.",
                remedy=f"Entries {'under ' + repr('.'.join(path)) if path else 'of the file'}: {shown or 'none'}.",
                file=file,
            )
        path, value, rest = (*path, name), children[name], rest[len(name) + 1 :]
    return path


def _follow(root: object, path: tuple[str, ...]) -> object:
    for name in path:
        root = dict(_children(root))[name]
    return root


# --- tensors ---------------------------------------------------------------------------------


def _usable(name: str, value: object, file: Path) -> Tensor | None:
    """``value`` if it is a tensor; None for anything else that is not meant to be one."""
    if isinstance(value, Tensor):
        return value
    unusable = value if isinstance(value, Unusable) else unusable_stub(value)
    if unusable is not None:
        raise UnsupportedError(
            f"The tensor cannot be converted: it is {unusable.reason}.",
            remedy=unusable.remedy,
            file=file,
            tensor=name,
        )
    return None


def _dict_tensors(value: object, file: Path, notes: list[str]) -> dict[str, Tensor]:
    entries = _entries(value)
    tensors: dict[str, Tensor] = {}
    skipped: list[tuple[str, object]] = []
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if not isinstance(name, str):
            if _is_tensor(entry):
                raise FormatError(
                    f"A tensor has a key of type {_describe(name)}, which is no name.",
                    remedy="Give it a name, or choose another dict with --key NAME.",
                    file=file,
                )
            skipped.append((_describe(name), entry))
            continue
        tensor = _usable(name, entry, file)
        if tensor is None:
            skipped.append((name, entry))
        else:
            tensors[name] = tensor
    notes += _skipped("Among the weights are entries that are no tensors, skipped", skipped)
    return tensors


def _module_tensors(module: Stub, file: Path, notes: list[str]) -> dict[str, Tensor]:
    """The tensors of a pickled nn.Module under the names that ``Module.state_dict`` gives them."""
    tensors: dict[str, Tensor] = {}
    stack: list[tuple[str, object, int]] = [("", module, 0)]
    visits = 0
    while stack:
        prefix, value, depth = stack.pop()
        visits += 1
        if depth > MAX_DEPTH or visits > MAX_MODULES:
            raise FormatError("Modules are nested too deeply, or in each other.", remedy=_SAVE_STATE_DICT, file=file)
        state = value.state if isinstance(value, Stub) and _is_module(value) else None
        if not isinstance(value, Stub) or not isinstance(state, dict):
            raise _no_clean_module(f"'{prefix}' is no module", file)
        if value.callee.module.startswith(_PACKED_MODULES):
            raise _no_clean_module(f"'{prefix}' is a {value.callee}, which keeps its weights packed", file)
        if any(state.get(hooks) for hooks in ("_state_dict_hooks", "_state_dict_pre_hooks")):
            raise _no_clean_module(f"'{prefix}' changes its state dict by hooks", file)
        parts = [state["_parameters"], state.get("_buffers", {}), state["_modules"]]
        if not all(isinstance(part, dict) for part in parts):
            raise _no_clean_module(f"'{prefix}' keeps its parts in another way", file)
        parameters, buffers, modules = parts
        hidden = _entries(state.get("_non_persistent_buffers_set")) or ()
        for name, entry in [*parameters.items(), *((k, v) for k, v in buffers.items() if k not in hidden)]:
            tensor = _usable(f"{prefix}{name}", entry, file)
            if tensor is not None:
                tensors[f"{prefix}{name}"] = tensor
            elif entry is not None:
                raise _no_clean_module(f"'{prefix}{name}' is no tensor", file)
        children = [(f"{prefix}{name}.", child, depth + 1) for name, child in modules.items() if child is not None]
        stack.extend(reversed(children))
    notes.append(
        f"The file holds a whole module ({_describe(module)}); its tensors have the names that Module.state_dict gives."
    )
    return tensors


def _no_clean_module(why: str, file: Path) -> UnsupportedError:
    return UnsupportedError(
        f"The file holds a whole module whose weights cannot be told from outside: {why}.",
        remedy=_SAVE_STATE_DICT,
        file=file,
    )


# --- partitions ------------------------------------------------------------------------------


def _zero_part(file: Path) -> UnsupportedError:
    return UnsupportedError(
        "This is a part of a DeepSpeed ZeRO checkpoint: its weights are spread over the ranks' files.",
        remedy="Merge them with DeepSpeed's zero_to_fp32.py, then convert what it writes.",
        file=file,
    )


def _refuse_partitions(root: object, file: Path) -> None:
    """Refuse an optimizer file of DeepSpeed ZeRO, which holds flat parts of the weights."""
    for entries in (_entries(root), *(_entries(child) for _, child in _children(root))):
        if isinstance(entries, dict) and ("zero_stage" in entries or "single_partition_of_fp32_groups" in entries):
            raise _zero_part(file)


def _refuse_placeholders(root: object, tensors: dict[str, Tensor], file: Path) -> None:
    """Refuse what has names and not the weights: ZeRO stage 3's empty tensors, FSDP's flat parameters."""
    entries = _entries(root)
    deepspeed = isinstance(entries, dict) and ("ds_version" in entries or "ds_config" in entries)
    if deepspeed and tensors and all(0 in tensor.shape for tensor in tensors.values()):
        raise _zero_part(file)
    flat = next((n for n in tensors if n.rpartition(".")[2].startswith(("_flat_param", "flat_param"))), None)
    if flat is not None:
        raise UnsupportedError(
            "This is one rank's part of an FSDP checkpoint: its weights are flattened together.",
            remedy="Save a full state dict (StateDictType.FULL_STATE_DICT), or use format_utils.dcp_to_torch_save.",
            file=file,
            tensor=flat,
        )


# --- words -----------------------------------------------------------------------------------


def _tensors(count: int) -> str:
    return f"{count} tensor" if count == 1 else f"{count} tensors"


def _short(name: str) -> str:
    """A name from the file, for a sentence."""
    return printable(name if len(name) <= 100 else f"{name[:97]}...")


def _describe(value: object) -> str:
    if isinstance(value, Stub):
        return _short(str(value.callee))
    if isinstance(value, Tensor):
        return f"tensor of shape {value.shape}"
    return "None" if value is None else type(value).__name__


def _skipped(what: str, entries: Sequence[tuple[str, object]]) -> list[str]:
    if not entries:
        return []
    shown = ", ".join(f"{_short(name)} ({_describe(value)})" for name, value in entries[:_SHOWN])
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return [f"{what}: {shown}{more}."]
