"""The MindSpore side: a checkpoint loaded by MindSpore itself into a network that reads its own layout."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckptbridge.errors import BackendError, CoverageError, FormatError, ShapeError, UsageError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.verification.nets.families import model_spec
from ckptbridge.verification.nets.layouts import decoder_layout
from ckptbridge.verification.nets.spec import DecoderSpec, EncoderSpec
from ckptbridge.verification.sides.stages import Stages, check_tokens

if TYPE_CHECKING:
    from ckptbridge.verification.nets.bert import Encoder
    from ckptbridge.verification.nets.decoder import Decoder
    from ckptbridge.verification.nets.weights import Weights

# Buffers that published checkpoints carry and no forward reads.
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
)
_SHOWN = 5  # names in a message before "and N more"


@dataclass(frozen=True, slots=True)
class Network:
    """How a spec becomes the network that reads this checkpoint."""

    target: str
    layout: Mapping[str, str]
    names: frozenset[str]  # of the checkpoint

    def build(self, spec: DecoderSpec | EncoderSpec) -> Decoder | Encoder:
        if isinstance(spec, EncoderSpec):
            from ckptbridge.verification.nets.bert import encoder

            return encoder(spec, self.target, self.names)
        from ckptbridge.verification.nets.decoder import decoder

        stored = decoder_layout(spec, self.target, self.layout, self.names)
        return decoder(spec, stored, own_head=f"{stored.head}.weight" in self.names)


@dataclass(frozen=True, slots=True)
class MsSide:
    """A loaded MindSpore network. ``unused``: tensors of the file that the forward does not read."""

    spec: DecoderSpec | EncoderSpec
    network: Network
    weights: Weights
    unused: tuple[str, ...]

    def forward(self, tokens: NDArray[Any]) -> Stages:
        """All stages for ``tokens``, integers (B, T)."""
        import mindspore as ms

        ids = check_tokens(tokens, self.spec.vocab, self.spec.longest)
        values: dict[str, NDArray[Any]] = {}
        feeds: dict[str, tuple[str, ...]] = {}

        def tap(stage: str, tensor: Any) -> None:
            values[stage] = (tensor if tensor.dtype == ms.float64 else tensor.astype(ms.float32)).asnumpy()
            feeds[stage] = self.weights.read_since()

        self.weights.read_since()
        try:
            self.network.build(self.spec).run(self.weights, ms.Tensor(ids, ms.int32), tap)
        # A kernel that the device lacks for this type shows in one of these, sometimes an operation later.
        except (TypeError, RuntimeError, ValueError) as error:
            raise BackendError(
                f"MindSpore cannot compute the forward: {first_line(error)}",
                remedy="Give another --dtype (float64 and float32 work on the CPU) or --ms-device.",
            ) from error
        return Stages(values, feeds)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that the forward reads."""
        return self.weights.names

    def value(self, name: str) -> NDArray[Any]:
        """A copy of one parameter as it was loaded, in the file's dtype."""
        return np.array(self.weights.parameter(name).asnumpy())

    @contextmanager
    def replaced(self, values: Mapping[str, NDArray[Any]]) -> Iterator[None]:
        """Other values, of the same shape and dtype, for some parameters while the ``with`` lasts."""
        import mindspore as ms

        kept = {name: self.value(name) for name in values}
        try:
            for name, value in values.items():
                self.weights.parameter(name).set_data(ms.Tensor(value))
            yield
        finally:
            for name, value in kept.items():
                self.weights.parameter(name).set_data(ms.Tensor(value))

    def with_epsilon(self, eps: float) -> MsSide:
        """The same weights in a network whose norms have another epsilon."""
        return replace(self, spec=replace(self.spec, eps=eps))


def load(
    path: Path,
    config: Mapping[str, Any],
    target: str,
    layout: Mapping[str, str] | None = None,
    dtype: str = "float64",
    device: str = "CPU",
) -> MsSide:
    """Load ``path`` (a .ckpt or safetensors file, or a directory of either) with MindSpore for ``target``.

    The network is built from ``config`` in the file's own dtypes and loaded strictly; only then is
    anything cast to ``dtype``. Raises CoverageError when a tensor is missing or unexpected, ShapeError
    when one has not the shape that the config asks for, FormatError when MindSpore cannot read the file
    (or this tool's own reader finds it damaged), BackendError when MindSpore or the device is missing.
    """
    ms = backend(device)
    if dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise UsageError(f"The forward cannot be computed in '{dtype}'.", remedy="Use float64 or float32.")
    spec = model_spec(config)
    loaded = load_files(ms, path)
    network = Network(target, dict(layout or {}), frozenset(loaded))
    shapes = network.build(spec).shapes()
    unused = _check(path, loaded, shapes, spec, int(config.get("num_nextn_predict_layers") or 0))

    from ckptbridge.verification.nets.weights import Weights

    weights = Weights(shapes, {name: loaded[name].dtype for name in shapes}, getattr(ms, dtype))
    wanted = {name: loaded[name] for name in shapes}
    try:
        missing, unexpected = ms.load_param_into_net(weights.cell, wanted, strict_load=True)
    except (RuntimeError, TypeError) as error:
        raise FormatError(f"MindSpore does not load this checkpoint: {first_line(error)}.", file=path) from error
    if missing or unexpected:
        raise CoverageError(
            f"MindSpore left tensors unloaded: {some(missing)} missing, {some(unexpected)} unexpected.", file=path
        )
    return MsSide(spec, network, weights, unused)


def backend(device: str) -> Any:
    """MindSpore, on ``device``. Raises BackendError when either is missing."""
    try:
        import mindspore as ms
    except ImportError as error:
        raise BackendError(
            "The MindSpore side needs MindSpore, and it cannot be imported.",
            remedy="Install it: pip install 'ckptbridge[mindspore]'.",
            reason=first_line(error),
        ) from error
    try:
        # A device can be chosen only before the first kernel runs, so not once more when it is the right one.
        if ms.get_context("device_target") != device:
            ms.set_device(device)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BackendError(
            f"MindSpore cannot use the device '{device}' here.",
            remedy="Give --ms-device CPU, or run where the device and its MindSpore are installed.",
            reason=first_line(error),
        ) from error
    return ms


def load_files(ms: Any, path: Path) -> dict[str, Any]:
    """Name to Parameter of all files of ``path``. Strings (``append_info`` and the like) are left out."""
    inventory = open_inventory(path)
    if inventory.format == "bin":
        raise FormatError(
            "This is a PyTorch file, and the MindSpore side is asked for.",
            remedy="Name the PyTorch checkpoint first and the MindSpore one second.",
            file=path,
        )
    loaded: dict[str, Any] = {}
    for file in inventory.files:
        values = _load_file(ms, file, inventory.format)
        loaded |= {name: value for name, value in values.items() if not isinstance(value, str)}
    return loaded


def _load_file(ms: Any, file: Path, kind: str) -> dict[str, Any]:
    """``mindspore.load_checkpoint`` of one file. It goes by the name's suffix, so it gets a link with the right one."""
    with tempfile.TemporaryDirectory(prefix="ckptbridge-") as folder:
        link = Path(folder) / f"weights.{kind}"
        link.symlink_to(file.resolve())
        try:
            loaded: dict[str, Any] = ms.load_checkpoint(str(link), format=kind)
        # MindSpore raises whatever its parser meets: ValueError, TypeError, KeyError, protobuf's own.
        except Exception as error:
            raise FormatError(
                f"MindSpore cannot read this checkpoint: {first_line(error)}",
                remedy="ckptbridge inspect says what the file holds.",
                file=file,
            ) from error
    return loaded


def _check(
    path: Path,
    loaded: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    spec: DecoderSpec | EncoderSpec,
    extra_layers: int,
) -> tuple[str, ...]:
    """Names and shapes against what the forward reads; returns the known tensors that it does not.

    MindSpore's own check is weaker: it warns of missing tensors, and lets trailing axes of one pass.
    """
    missing = [name for name in shapes if name not in loaded]
    extra = [name for name in loaded if name not in shapes]
    # 0-d entries are the training state that append_dict mixes in (epoch_num, loss_scale ...).
    unknown = [n for n in extra if loaded[n].shape != () and not _unread(n, spec, extra_layers)]
    if missing or unknown:
        parts = [f"{some(names)} {what}" for names, what in ((missing, "missing"), (unknown, "unexpected")) if names]
        raise CoverageError(
            f"The MindSpore checkpoint does not fit the config and layout: {'; '.join(parts)}.",
            remedy="Check that config, --target and --layout are those that the checkpoint was written for.",
            file=path,
        )
    for name, shape in shapes.items():
        if tuple(loaded[name].shape) != tuple(shape):
            raise ShapeError(
                f"The config asks for shape {tuple(shape)} and the file has {tuple(loaded[name].shape)}.",
                remedy="Check that config, --target and --layout are those that the checkpoint was written for.",
                tensor=name,
                file=path,
            )
    return tuple(extra)


def _unread(name: str, spec: DecoderSpec | EncoderSpec, extra_layers: int) -> bool:
    """Whether ``name`` is known to play no part: a buffer, multi-token prediction, another head of an encoder."""
    if name.endswith(_BUFFERS):
        return True
    if isinstance(spec, EncoderSpec):
        return name.startswith(("cls.", "lm_head.", "classifier.", "qa_outputs.")) or "pooler." in name
    if name.startswith("mtp.") and extra_layers:
        return True
    parts = name.split(".")
    if "layers" in parts[:-1]:
        index = parts[parts.index("layers") + 1]
        return index.isdecimal() and spec.layers <= int(index) < spec.layers + extra_layers
    return False


def some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
