"""The parameters of a network: exactly a checkpoint's names, shapes and dtypes, cast only when read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

Shapes = dict[str, tuple[int, ...]]
Tensor = Any  # mindspore.Tensor; the package carries no types


class Weights:
    """Parameters in the dtypes of their file, given out in the compute dtype.

    ``cell`` is what ``mindspore.load_param_into_net`` fills: a flat cell whose parameters carry the
    checkpoint's own names. Nothing is cast before it is read, and then only for that moment, so a float64
    comparison of a bfloat16 model does not hold the model in float64.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, Any], compute: Any) -> None:
        self.compute = compute
        self.cell = nn.Cell()
        self._read: dict[str, None] = {}
        self._parameters: dict[str, Any] = {}
        for name, shape in shapes.items():
            value = initializer("zeros", shape, dtypes.get(name, ms.float32))
            self._parameters[name] = Parameter(value, name=name, requires_grad=False)
            self.cell.insert_param_to_cell(name, self._parameters[name], check_name_contain_dot=False)

    @property
    def wide(self) -> Any:
        """The dtype of norms, softmax and router: never below float32."""
        return ms.float64 if self.compute == ms.float64 else ms.float32

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def parameter(self, name: str) -> Any:
        """The parameter itself, in the file's dtype."""
        return self._parameters[name]

    def __call__(self, name: str, dtype: Any = None) -> Tensor:
        self._read[name] = None
        return ops.cast(self._parameters[name], dtype or self.compute)

    def rows(self, name: str, indices: Tensor) -> Tensor:
        """Rows of a table, cast after they are picked: an embedding is the widest tensor there is."""
        self._read[name] = None
        table = self._parameters[name]
        if table.dtype == ms.bfloat16:  # has no gather on the CPU; float32 holds each of its values
            table = ops.cast(table, ms.float32)
        return ops.cast(ops.gather(table, indices, 0), self.compute)

    def part(self, name: str, first: int, last: int) -> Tensor:
        """Entries ``first`` to ``last`` of the leading axis, cast after they are cut out: one expert of many."""
        self._read[name] = None
        return ops.cast(self._parameters[name][first:last], self.compute)

    def read_since(self) -> tuple[str, ...]:
        """Names read since the last call: what feeds the stage that ends here."""
        names = tuple(self._read)
        self._read.clear()
        return names
