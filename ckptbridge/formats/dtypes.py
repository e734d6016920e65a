"""The one dtype table: what each element type is called in every format, and its storage word.

Layouts move opaque words; only :mod:`ckptbridge.conversion.cast` looks at values. Sources of the
names: the safetensors header specification, MindSpore's ``tensor_to_ms_type`` keys, and torch's
legacy storage classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptbridge.errors import DTypeError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``safetensors`` and ``mindspore`` are the names in those files, ``torch`` the attribute of the
    torch module, ``storage`` torch's storage class; an empty string means that the format has none.
    """

    name: str
    itemsize: int
    kind: str  # "float", "int", "uint", "bool" or "complex"
    safetensors: str
    mindspore: str
    torch: str
    storage: str

    @property
    def floating(self) -> bool:
        return self.kind == "float"

    @property
    def word(self) -> np.dtype[np.generic]:
        """The storage word: an unsigned integer of the same size (16 bytes: an opaque void)."""
        return np.dtype(f"<u{self.itemsize}") if self.itemsize <= 8 else np.dtype(f"V{self.itemsize}")

    def __str__(self) -> str:
        return self.name


DTYPES: tuple[DType, ...] = (
    DType("float64", 8, "float", "F64", "Float64", "float64", "DoubleStorage"),
    DType("float32", 4, "float", "F32", "Float32", "float32", "FloatStorage"),
    DType("float16", 2, "float", "F16", "Float16", "float16", "HalfStorage"),
    DType("bfloat16", 2, "float", "BF16", "BFloat16", "bfloat16", "BFloat16Storage"),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3", "", "float8_e4m3fn", ""),
    DType("float8_e5m2", 1, "float", "F8_E5M2", "", "float8_e5m2", ""),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0", "", "float8_e8m0fnu", ""),
    DType("int64", 8, "int", "I64", "Int64", "int64", "LongStorage"),
    DType("int32", 4, "int", "I32", "Int32", "int32", "IntStorage"),
    DType("int16", 2, "int", "I16", "Int16", "int16", "ShortStorage"),
    DType("int8", 1, "int", "I8", "Int8", "int8", "CharStorage"),
    DType("uint64", 8, "uint", "U64", "UInt64", "uint64", ""),
    DType("uint32", 4, "uint", "U32", "UInt32", "uint32", ""),
    DType("uint16", 2, "uint", "U16", "UInt16", "uint16", ""),
    DType("uint8", 1, "uint", "U8", "UInt8", "uint8", "ByteStorage"),
    DType("bool", 1, "bool", "BOOL", "Bool", "bool", "BoolStorage"),
    DType("complex64", 8, "complex", "C64", "", "complex64", "ComplexFloatStorage"),
    DType("complex128", 16, "complex", "", "", "complex128", "ComplexDoubleStorage"),
)

BY_NAME = {d.name: d for d in DTYPES}
BY_SAFETENSORS = {d.safetensors: d for d in DTYPES if d.safetensors}
BY_MINDSPORE = {d.mindspore: d for d in DTYPES if d.mindspore}
BY_TORCH = {d.torch: d for d in DTYPES}
BY_STORAGE = {d.storage: d for d in DTYPES if d.storage}

# What people type, beside the canonical names.
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def dtype_named(name: str) -> DType:
    """The dtype that a user calls ``name`` (``bfloat16``, ``bf16``, ``fp32`` ...).

    Raises DTypeError, listing the names there are.
    """
    found = BY_NAME.get(_SHORT.get(name, name))
    if found is None:
        raise DTypeError(f"There is no dtype '{name}'.", remedy=f"Use one of: {', '.join(BY_NAME)}.")
    return found
