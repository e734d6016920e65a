"""The inputs on disk, each made once, when a row first asks for it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmark import inputs
from benchmark.measure import run

CKPTBRIDGE = [sys.executable, "-m", "ckptbridge"]
_PUBLISHED = Path(__file__).parents[2] / "mappings" / "configs"


@dataclass(frozen=True)
class Sizes:
    """How large the inputs are, in bytes."""

    model: int
    growth: tuple[int, ...]
    tensor: int
    file: int


class Stock:
    """Makes and keeps inputs below a folder."""

    def __init__(self, work: Path, sizes: Sizes, peer_python: str) -> None:
        self.work = work
        self.sizes = sizes
        self.peer_python = peer_python

    def _model(self, name: str, make: Callable[[], inputs.Checkpoint], shards: int = 2, sparse: bool = False) -> Path:
        """A safetensors checkpoint of two shards."""
        path = self.work / "inputs" / name
        if not path.exists():
            partial = path.with_name(path.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            inputs.write(partial, make(), shards, sparse).rename(path)
        return path

    def _converted(self, name: str, direction: str, source: Path, *options: str) -> Path:
        """What ckptbridge makes of another input."""
        path = self.work / "inputs" / name
        if not path.exists():
            run([*CKPTBRIDGE, "convert", direction, str(source), str(path), "--quiet", *options])
        return path

    def llama_of(self, nbytes: int) -> Path:
        """A bfloat16 Llama of about ``nbytes``."""
        return self._model(f"llama-{nbytes}", lambda: inputs.llama(nbytes))

    @property
    def llama(self) -> Path:
        return self.llama_of(self.sizes.model)

    @property
    def llama_float32(self) -> Path:
        """The same model in float32: twice the bytes."""
        return self._model("llama-float32", lambda: inputs.llama(2 * self.sizes.model, "F32"))

    @property
    def moe(self) -> Path:
        return self._model("moe", lambda: inputs.deepseek_v3(self.sizes.model))

    @property
    def moe_fp8(self) -> Path:
        return self._model("moe-fp8", lambda: inputs.deepseek_v3(self.sizes.model // 2, fp8=True))

    @property
    def legacy_ckpt(self) -> Path:
        return self._converted("llama-legacy.ckpt", "pt2ms", self.llama, "--target", "mindformers-legacy")

    @property
    def fused_ckpt(self) -> Path:
        return self._converted("llama-fused.ckpt", "pt2ms", self.llama, "--target", "mindformers")

    @property
    def moe_ckpt(self) -> Path:
        return self._converted("moe.ckpt", "pt2ms", self.moe)

    @property
    def dequantised_ckpt(self) -> Path:
        return self._converted("moe-fp8.ckpt", "pt2ms", self.moe_fp8)

    @property
    def bin(self) -> Path:
        """A folder of .bin files; ckptbridge writes what torch.save writes, byte for byte."""
        half = str(self.sizes.model // 2)
        return self._converted("llama-bin", "ms2pt", self.legacy_ckpt, "--format", "bin", "--max-shard-size", half)

    @property
    def thousand_tensors(self) -> Path:
        """A file of 1000 small tensors."""
        path = self.work / "inputs" / "thousand.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            inputs.write_file(path, [inputs.Tensor(f"layers.{k}.weight", "F32", (64, 64)) for k in range(1000)], None)
        return path

    @property
    def one_large_tensor(self) -> Path:
        return self._model("one-tensor", lambda: inputs.one_large_tensor(self.sizes.tensor), 1, sparse=True)

    @property
    def large_file(self) -> Path:
        return self._model("one-file", lambda: inputs.llama(self.sizes.file), 1, sparse=True)

    def published(self, model: str, layers: int | None) -> Path:
        """Names and shapes of a published DeepSeek, or of its first layers: headers over holes."""

        def checkpoint() -> inputs.Checkpoint:
            config = json.loads((_PUBLISHED / f"{model}.json").read_text())
            config.pop("quantization_config", None)
            config["num_hidden_layers"] = layers or config["num_hidden_layers"]
            return config, inputs.deepseek_tensors(config)

        return self._model(f"{model}-{layers or 'all'}", checkpoint, shards=163, sparse=True)
