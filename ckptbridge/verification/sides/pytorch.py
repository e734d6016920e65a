"""The PyTorch side: transformers' own model, with the weights of the file that is judged."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptbridge.errors import BackendError, ConfigError, CoverageError, FormatError, UnsupportedError, UsageError
from ckptbridge.formats.detect import open_inventory
from ckptbridge.formats.lazy import read_words
from ckptbridge.formats.tensors import Inventory
from ckptbridge.verification.sides.devices import check_device
from ckptbridge.verification.sides.stages import Stages, check_tokens

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PtSide:
    """A loaded transformers model. ``dtype`` names the compute dtype."""

    model: Any
    dtype: str

    def forward(self, tokens: NDArray[Any]) -> Stages:
        """All stages for ``tokens``, integers (B, T)."""
        import torch

        config = self.model.config
        ids = check_tokens(tokens, int(config.vocab_size), _longest(config))
        values: dict[str, NDArray[Any]] = {}
        taps = stage_modules(self.model)
        with ExitStack() as stack:
            for stage, module in taps.items():
                hook = module.register_forward_hook(_keep(values, stage))
                stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            if self.dtype == "float64":
                stack.enter_context(float64_islands())
            output = self.model(input_ids=torch.from_numpy(ids).to(self.model.device))
        feeds = {
            stage: tuple(f"{name}.{part}" for part, _ in module.named_parameters())
            for stage, module, name in _named(self.model, taps)
        }
        logits = getattr(output, "logits", None)
        values["logits"] = _array(output.last_hidden_state if logits is None else logits)
        feeds.setdefault("logits", ())
        if getattr(output, "pooler_output", None) is not None:
            values["pooled"] = _array(output.pooler_output)
            feeds.setdefault("pooled", ())
        return Stages(values, feeds)


_ENCODERS = ("bert", "roberta", "xlm-roberta")


def _longest(config: Any) -> int:
    """Tokens that there are positions for, where positions are rows of a table; otherwise 0."""
    if config.model_type in ("gpt2", "bert"):
        return int(config.max_position_embeddings)
    if config.model_type in _ENCODERS:  # RoBERTa counts from the position after padding's
        return int(config.max_position_embeddings) - int(config.pad_token_id) - 1
    return 0


def load(
    path: Path,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float64",
    device: str = "cpu",
    key: str | None = None,
) -> PtSide:
    """Load ``path`` (a Hugging Face directory, or one safetensors or .bin file) with transformers.

    ``config`` is the parsed config.json; None takes the one beside the weights. ``key`` chooses among a
    .bin's nested state dicts. Attention is eager, the model in eval mode and in ``dtype``. Raises
    CoverageError when anything is missing, unexpected or of another shape, UnsupportedError for a model
    that transformers does not have, FormatError for files that cannot be loaded, BackendError when torch
    or transformers is missing.
    """
    torch, transformers = _backends()
    if dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise UsageError(f"The forward cannot be computed in '{dtype}'.", remedy="Use float64 or float32.")
    check_device(torch, device)
    settings = _config(path) if config is None else dict(config)
    if settings.get("quantization_config"):
        raise UnsupportedError(
            "The forward of a quantised PyTorch checkpoint is not computed.",
            remedy="Compare with the dequantised checkpoint, or give --level weights.",
            file=path,
        )
    settings.pop("auto_map", None)  # transformers' own classes, never code beside the weights
    chosen = _model_class(transformers, settings)
    inventory = open_inventory(path, key)
    if inventory.format == "ckpt":
        raise FormatError(
            "This is a MindSpore file, and the PyTorch side is asked for.",
            remedy="Name the PyTorch checkpoint first and the MindSpore one second.",
            file=path,
        )
    options = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported, and refused below
    }
    with tempfile.TemporaryDirectory(prefix="ckptbridge-") as folder, _quiet(transformers):
        (Path(folder) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        try:
            by_file = _own_names(torch, inventory)
            if set(by_file) == set(inventory.tensors):
                _link(inventory, by_file, Path(folder))
                model, info = chosen.from_pretrained(folder, local_files_only=True, **options)
            else:  # a wrapped state dict, or names with a prefix, which transformers does not look through
                made = transformers.AutoConfig.from_pretrained(folder)
                model, info = chosen.from_pretrained(
                    None, config=made, state_dict=_state_dict(torch, inventory), **options
                )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise FormatError(f"transformers cannot load this checkpoint: {text[0][:300]}", file=path) from error
    _check(path, info, settings)
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval()
    if dtype == "float64":
        _recompute_frequencies(model)
    return PtSide(model, dtype)


def _backends() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise BackendError(
            "The PyTorch side needs torch and transformers, and they cannot be imported.",
            remedy="Install them: pip install 'ckptbridge[verify]'.",
            reason=str(error),
        ) from error
    return torch, transformers


def _config(path: Path) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "There is no readable config.json beside the PyTorch weights.", remedy="Give --config FILE.", file=file
        ) from error
    if not isinstance(found, dict):
        raise ConfigError("This config.json is not a JSON object.", file=file)
    return found


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bar and no load report: what is in the report is checked below."""
    log = transformers.utils.logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()


def _model_class(transformers: Any, settings: Mapping[str, Any]) -> Any:
    """The class that the config's ``architectures`` names; without it, the one with a language-model head."""
    model_type = settings.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no model type '{model_type}'.",
            remedy="Give a function that computes the logits with --pt-model MODULE:FUNCTION.",
        )
    architectures = settings.get("architectures")
    if architectures:
        chosen = getattr(transformers, str(architectures[0]), None)
        if chosen is None:
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no class '{architectures[0]}'.",
                remedy="Give a function that computes the logits with --pt-model MODULE:FUNCTION.",
            )
        return chosen
    return transformers.AutoModel if model_type in _ENCODERS else transformers.AutoModelForCausalLM


def _own_names(torch: Any, inventory: Inventory) -> dict[str, Path]:
    """Tensor name to file, as torch and safetensors themselves see the files; empty when torch refuses one."""
    found: dict[str, Path] = {}
    for file in inventory.files:
        if inventory.format == "safetensors":
            from safetensors import safe_open

            with safe_open(file, "np") as opened:
                names = list(opened.keys())
        else:
            try:
                names = list(torch.load(file, map_location="meta", weights_only=True))
            except (pickle.UnpicklingError, RuntimeError, TypeError, ValueError, EOFError):
                return {}
        found |= dict.fromkeys(names, file)
    return found


def _link(inventory: Inventory, by_file: Mapping[str, Path], folder: Path) -> None:
    """Links to the files under the names that transformers looks for; the files may have any names."""
    stem, suffix = ("model", "safetensors") if inventory.format == "safetensors" else ("pytorch_model", "bin")
    files = inventory.files
    names = {file: f"{stem}-{k:05}-of-{len(files):05}.{suffix}" for k, file in enumerate(files, 1)}
    if len(files) == 1:
        names = {files[0]: f"{stem}.{suffix}"}
    else:
        index = {"metadata": {}, "weight_map": {name: names[file] for name, file in by_file.items()}}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file, name in names.items():
        (folder / name).symlink_to(file.resolve())


def _state_dict(torch: Any, inventory: Inventory) -> dict[str, Any]:
    tensors = {}
    for name, source in inventory.tensors.items():
        words = torch.from_numpy(read_words(source))
        tensors[name] = words.view(getattr(torch, source.spec.dtype.torch))
    return tensors


def _check(path: Path, info: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    parts = []
    for key, what in (
        ("missing_keys", "missing"),
        ("unexpected_keys", "unexpected"),
        ("mismatched_keys", "of another shape"),
    ):
        names = sorted(str(k[0] if isinstance(k, tuple) else k) for k in info.get(key) or ())
        if key == "unexpected_keys":
            names = [name for name in names if not _predicts_more(name, config)]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{', '.join(names[:_SHOWN])}{more} {what}")
    if parts:
        raise CoverageError(
            f"The PyTorch checkpoint does not fit its config: {'; '.join(parts)}.",
            remedy="Check that config.json belongs to these weights.",
            file=path,
        )


def _predicts_more(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer, which the logits do not need.

    transformers itself passes over them by the layer numbers of the published models alone.
    """
    layers, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    parts = name.split(".")
    at = parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""
    return isinstance(layers, int) and at.isdecimal() and layers <= int(at) < layers + more


def _recompute_frequencies(model: Any) -> None:
    """RoPE's inverse frequencies are computed in float32 when a model is built: build them again in float64."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            parent = model.get_submodule(name.rpartition(".")[0])
            with float64_islands():
                fresh = type(module)(config=module.config)
            setattr(parent, name.rpartition(".")[2], fresh.to(model.device))


@contextmanager
def float64_islands() -> Iterator[None]:
    """float64 in place of every float32 that a model asks for on its way: ``.float()``, ``.to(float32)``,
    ``dtype=float32``. transformers computes norms, RoPE and softmax in float32 even in a float64 model.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class Islands(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.Tensor.float:
                return args[0].double()
            swapped = tuple(torch.float64 if a is torch.float32 else a for a in args)
            named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
            return func(*swapped, **named)

    with Islands():
        yield


def stage_modules(model: Any) -> dict[str, Any]:
    """The modules whose outputs are the stages, by stage name; stages that a model does not have are absent."""
    base = model.base_model
    body = getattr(base, "encoder", base)
    blocks = next((getattr(body, n) for n in ("layers", "h", "layer") if hasattr(body, n)), ())
    found: dict[str, Any] = {}
    if base.config.model_type in _ENCODERS:
        found["embedding"] = base.embeddings
    elif base.config.model_type == "gpt2":
        found["embedding"] = base.drop  # the sum of tokens and positions passes here
    else:
        found["embedding"] = base.get_input_embeddings()
    for i, block in enumerate(blocks):
        if base.config.model_type in _ENCODERS:
            attention, mlp = block.attention.output.dense, block.output.dense
        else:
            attention = next(getattr(block, n) for n in ("self_attn", "attention", "attn") if hasattr(block, n))
            mlp = block.mlp
        found |= {f"layers.{i}.attention": attention, f"layers.{i}.mlp": mlp, f"layers.{i}": block}
    for name in ("norm", "final_layer_norm", "ln_f"):
        if hasattr(base, name):
            found["final_norm"] = getattr(base, name)
    return found


def _named(model: Any, taps: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    names = {id(module): name for name, module in model.named_modules()}
    for stage, module in taps.items():
        yield stage, module, names.get(id(module), "")


def _keep(values: dict[str, NDArray[Any]], stage: str) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        values[stage] = _array(output[0] if isinstance(output, tuple) else output)

    return hook


def _array(tensor: Any) -> NDArray[Any]:
    import torch

    wide = tensor if tensor.dtype is torch.float64 else tensor.to(torch.float32)
    return np.array(wide.detach().cpu().numpy())
