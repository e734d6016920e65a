"""What torch's names in a pickle mean: storages, tensors, and tensors that are no plain arrays.

The signatures are those of the ``_rebuild_*`` functions in torch/_utils.py and of the persistent
ids in torch/serialization.py, torch 0.1.10 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptbridge.formats.dtypes import BY_STORAGE, BY_TORCH, DType
from ckptbridge.formats.files import MAX_DIMS, checked_numel
from ckptbridge.formats.pickle_objects import Constructor, Global, Misfit, Stub
from ckptbridge.formats.tensors import contiguous_strides

_MAX_INT = (1 << 63) - 1
_PLAIN_TENSORS = frozenset(
    ["torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"]
)
_UNTYPED = frozenset(["UntypedStorage", "_UntypedStorage"])


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage as persistent ids describe it; ``dtype`` None for an untyped one, counted in bytes.

    ``view`` are the first element and the length of a part of storage ``key`` (the older form only).
    """

    key: str
    dtype: DType | None
    type_name: str
    numel: int
    view: tuple[int, int] | None = None

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype is None else self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def start(self) -> int:
        """The first byte of this storage within storage ``key``."""
        return self.view[0] * self.itemsize if self.view else 0

    @property
    def view_nbytes(self) -> int:
        return self.view[1] * self.itemsize if self.view else self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A view of a storage: offset and strides in elements; strides None for C order."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    subclass: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Unusable:
    """A tensor that is no plain array in this file: ``reason`` ends the sentence "it is ..."."""

    reason: str
    remedy: str


@dataclass(slots=True)
class Storages:
    """The storages met in one pickle; ``persistent`` is what resolves its persistent ids."""

    by_key: dict[str, Storage] = field(default_factory=dict)

    def persistent(self, pid: object) -> object:
        """The storage (or, in the older form, class) that a persistent id names.

        Raises Misfit for what is no persistent id of torch.
        """
        if not isinstance(pid, tuple) or not pid:
            raise Misfit("A persistent id is no tuple")
        if pid[0] == "module" and len(pid) == 4 and isinstance(pid[1], Global):
            return pid[1]  # the older form wraps a module's class with its source, which is of no use here
        if pid[0] != "storage" or len(pid) not in (5, 6):
            raise Misfit("A persistent id names no storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if isinstance(key, int):  # torch 0.1 used numbers
            key = str(key)
        if not isinstance(kind, Global) or not isinstance(key, str) or not _count(numel):
            raise Misfit("A persistent id has a wrong type, key or size")
        dtype = None if kind.name in _UNTYPED else BY_STORAGE.get(kind.name)
        if not _of_torch(kind.module) or (
            dtype is None and kind.name not in _UNTYPED and not kind.name.endswith("Storage")
        ):
            raise Misfit(f"{kind} is no storage type")
        made = Storage(key, dtype, kind.name, numel)
        known = self.by_key.setdefault(key, made)
        if (known.nbytes or made.nbytes) and (known.type_name, known.numel) != (made.type_name, made.numel):
            raise Misfit(f"Storage '{key}' is described in two ways")
        # Empty storages of different types may share a key in torch.save; equal ones are made once.
        made = known if known.type_name == made.type_name else made
        if len(pid) == 6 and pid[5] is not None:
            return _view(made, pid[5])
        return made


def _of_torch(module: str) -> bool:
    """Whether a module is torch's, or that of a device of its own, such as torch_npu."""
    root, *inner = module.split(".")
    return (root == "torch" or root.startswith("torch_")) and all(part.isidentifier() for part in (root, *inner))


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT


def _view(root: Storage, metadata: object) -> Storage:
    """The part of ``root`` that the older form's view metadata (key, offset, size) selects."""
    if not isinstance(metadata, tuple) or len(metadata) != 3 or not _count(metadata[1]) or not _count(metadata[2]):
        raise Misfit("A storage view is malformed")
    if metadata[1] + metadata[2] > root.numel:
        raise Misfit(f"A view leaves storage '{root.key}'")
    return Storage(root.key, root.dtype, root.type_name, root.numel, view=(metadata[1], metadata[2]))


# --- tensors ---------------------------------------------------------------------------------


def _tensor(storage: object, offset: object, size: object, stride: object, dtype: DType | None) -> object:
    """A tensor whose every element lies inside its storage.

    Raises Misfit otherwise: torch would enlarge the storage and leave the rest uninitialised.
    """
    if not isinstance(storage, Storage):
        raise Misfit("The storage is none")
    shape, strides = _ints(size), _ints(stride)
    if not _count(offset) or not isinstance(offset, int) or len(shape) != len(strides):
        raise Misfit("Offset, size or stride do not fit")
    if dtype is None:
        dtype = storage.dtype
    if dtype is None:
        return Unusable(f"of type {storage.type_name}, which has no counterpart", "Cast or dequantize it in PyTorch.")
    numel = checked_numel(shape, dtype.itemsize)
    if numel is None:
        raise Misfit(f"The size {shape} overflows 64 bits")
    if numel:
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (last + 1) * dtype.itemsize > storage.view_nbytes:
            raise Misfit(
                f"Element {last} is outside storage '{storage.key}' of {storage.view_nbytes // dtype.itemsize} elements"
            )
    else:
        offset = 0
    return Tensor(storage, dtype, offset, shape, _canonical(shape, strides, numel))


def _ints(values: object) -> tuple[int, ...]:
    """A size or a stride: at most MAX_DIMS integers, none negative."""
    if isinstance(values, list):
        values = tuple(values)
    if not isinstance(values, tuple) or len(values) > MAX_DIMS or not all(_count(v) for v in values):
        raise Misfit("A size or stride is malformed or negative")
    return values


def _canonical(shape: tuple[int, ...], strides: tuple[int, ...], numel: int) -> tuple[int, ...] | None:
    """``strides`` with those of axes of length one, which address nothing, as C order has them."""
    plain = contiguous_strides(shape)
    if numel == 0:
        return None
    strides = tuple(p if n == 1 else s for n, s, p in zip(shape, strides, plain, strict=True))
    return None if strides == plain else strides


def _with_bits(tensor: object, metadata: object) -> object:
    """A lazily conjugated or negated tensor's stored bytes are not its values."""
    if metadata:
        return Unusable("lazily conjugated or negated", "Save tensor.resolve_conj().resolve_neg() instead.")
    return tensor


def _check_rest(requires_grad: object, metadata: list[object]) -> None:
    """What torch's functions would not take either."""
    if not isinstance(requires_grad, bool) or len(metadata) > 1:
        raise ValueError("tensor")


def _rebuild_tensor(args: tuple[object, ...]) -> object:
    storage, offset, size, stride = args
    return _tensor(storage, offset, size, stride, None)


def _rebuild_tensor_v2(args: tuple[object, ...]) -> object:
    storage, offset, size, stride, requires_grad, _hooks, *metadata = args
    _check_rest(requires_grad, metadata)
    return _with_bits(_tensor(storage, offset, size, stride, None), metadata and metadata[0])


def _rebuild_tensor_v3(args: tuple[object, ...]) -> object:
    storage, offset, size, stride, requires_grad, _hooks, kind, *metadata = args
    _check_rest(requires_grad, metadata)
    if not isinstance(kind, Global) or kind.module != "torch":
        raise Misfit("The dtype is none")
    dtype = BY_TORCH.get(kind.name)
    if dtype is None:
        return Unusable(f"of dtype {kind}, which has no counterpart", "Cast it in PyTorch, then save.")
    return _with_bits(_tensor(storage, offset, size, stride, dtype), metadata and metadata[0])


def _rebuild_parameter(args: tuple[object, ...]) -> object:
    """Parameter(data, requires_grad), hooks and, with state, its Python attributes: the data is all."""
    data, *rest = args
    if len(rest) not in (1, 2, 3):  # torch.nn.Parameter(data, requires_grad) by name has one
        raise ValueError("parameter")
    return data


def _rebuild_from_type(args: tuple[object, ...]) -> object:
    """(function, class, its arguments, Python attributes): a subclass, or a tensor with attributes."""
    function, kind, inner, _state = args
    if not isinstance(function, Global) or not isinstance(kind, Global) or not isinstance(inner, tuple):
        raise ValueError("subclass")
    if kind.module.startswith("torch.distributed"):
        return _SHARDED
    maker = CONSTRUCTORS.get(function)
    if maker is None or maker is _rebuild_from_type:
        return Unusable(f"a {kind} made by {function}", "Save tensor.as_subclass(torch.Tensor) instead.")
    made = maker(inner)
    if isinstance(made, Tensor) and str(kind) not in _PLAIN_TENSORS:
        return Tensor(made.storage, made.dtype, made.offset, made.shape, made.strides, subclass=str(kind))
    return made


def _rebuild_device_tensor(args: tuple[object, ...]) -> object:
    """XLA and other devices without storages: (a CPU tensor, dtype, device, requires_grad)."""
    data, kind, _device, _requires_grad = args
    if isinstance(data, Tensor) and kind == Global("torch", data.dtype.torch):
        return data
    return Unusable("a device tensor stored as something else", "Move it to the CPU in PyTorch, then save.")


def _unusable(reason: str, remedy: str) -> Constructor:
    return lambda args: Unusable(reason, remedy)


_SHARDED = Unusable(
    "one rank's part of a distributed tensor",
    "Gather the model first: torch.distributed.checkpoint.format_utils.dcp_to_torch_save, or a full state dict.",
)
_DENSE = "Save tensor.to_dense() instead."
_UTILS = "torch._utils"

CONSTRUCTORS: Mapping[Global, Constructor] = {
    Global(_UTILS, "_rebuild_tensor"): _rebuild_tensor,
    Global(_UTILS, "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    Global(_UTILS, "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    Global(_UTILS, "_rebuild_parameter"): _rebuild_parameter,
    Global(_UTILS, "_rebuild_parameter_with_state"): _rebuild_parameter,
    Global("torch.nn.parameter", "Parameter"): _rebuild_parameter,
    Global("torch._tensor", "_rebuild_from_type"): _rebuild_from_type,
    Global("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    Global("torch.tensor", "_rebuild_from_type"): _rebuild_from_type,  # its module in torch 1.7
    Global(_UTILS, "_rebuild_device_tensor_from_cpu_tensor"): _rebuild_device_tensor,
    Global(_UTILS, "_rebuild_device_tensor_from_numpy"): _rebuild_device_tensor,
    Global(_UTILS, "_rebuild_xla_tensor"): _rebuild_device_tensor,
    Global(_UTILS, "_rebuild_qtensor"): _unusable("quantized", "Save tensor.dequantize() instead."),
    Global(_UTILS, "_rebuild_sparse_tensor"): _unusable("sparse", _DENSE),
    Global(_UTILS, "_rebuild_sparse_csr_tensor"): _unusable("sparse", _DENSE),
    Global(_UTILS, "_rebuild_nested_tensor"): _unusable("a nested tensor", "Save its unbound parts instead."),
    Global(_UTILS, "_rebuild_meta_tensor_no_storage"): _unusable(
        "on the meta device: it has no data", "Materialize the model, load its weights, then save."
    ),
    Global(_UTILS, "_rebuild_wrapper_subclass"): _unusable(
        "a wrapper without data of its own", "Save the tensors that it wraps, or its dequantized value."
    ),
    Global("torch", "Size"): lambda args: _ints(args[0]) if args else (),
}


def unusable_stub(value: object) -> Unusable | None:
    """Why a stub that stands where a tensor should is none; None for anything else that is skipped."""
    if not isinstance(value, Stub):
        return None
    module, name = value.callee.module, value.callee.name
    if module.startswith("torch.distributed"):
        return _SHARDED
    # What a newer torch makes tensors with, and classes that are tensors by their names.
    if (module.startswith("torch") and name.startswith("_rebuild")) or name.endswith("Tensor"):
        return Unusable(f"a {value.callee}, which is not read", "Save a plain tensor instead.")
    return None
