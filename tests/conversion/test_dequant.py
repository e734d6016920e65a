"""Block dequantisation against the product written out with torch, in every kind of layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptbridge.conversion.plan import FileStat, Record, Scale
from ckptbridge.conversion.sources import SourceFiles
from ckptbridge.conversion.words import fill, record_pieces
from ckptbridge.formats import safetensors
from ckptbridge.formats.dtypes import BY_NAME
from ckptbridge.formats.tensors import TensorSpec
from ckptbridge.tables.axes import bind_axes, parse_axes

BLOCK = (4, 8)
SIZES = {"n": 3, "p": 5, "v": 2, "r": 19, "f": 11, "h": 21}


def quantised(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8 words, their ragged scales, and the product in float32 as torch computes it."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    words[(words & 0x7F) == 0x7F] = 0  # no NaN
    weight = words.view(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]), generator=generator) + 0.01
    spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:rows, :columns]
    return weight, scale, weight.float() * spread


def run(tmp_path: Path, tensors: list, line: str, target: str, buffer_bytes: int) -> tuple[list[np.ndarray], list]:
    path = tmp_path / "q.safetensors"
    stored = {}
    for k, (weight, scale, _) in enumerate(tensors):
        stored[f"w{k}"], stored[f"w{k}.scale"] = weight, scale
    save_file(stored, path)
    inventory = safetensors.read(path)
    sources = tuple(inventory.tensors[f"w{k}"] for k in range(len(tensors)))
    scales = tuple(Scale(inventory.tensors[f"w{k}.scale"], *BLOCK) for k in range(len(tensors)))
    bound = bind_axes(parse_axes(line), SIZES)
    assert bound.left == tuple(s.spec.shape for s in sources)
    stat = path.stat()
    results, counts = [], []
    with SourceFiles({path: FileStat(stat.st_size, stat.st_mtime_ns)}) as files:
        for k, shape in enumerate(bound.right):
            blocks = tuple(b for b in bound.blocks if b.right.tensor == k)
            record = Record(TensorSpec("t", BY_NAME[target], shape), sources, blocks, "", line, scales)
            filled = [fill(record, piece, files) for piece in record_pieces(record, buffer_bytes)]
            counts += [f.lost for f in filled]
            results.append(np.concatenate([f.words for f in filled]).reshape(shape))
    return results, counts


def words_of(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.element_size()
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy().view(f"u{size}")


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("target", ["bfloat16", "float32", "float16", "float64"])
def test_every_layout_multiplies_each_word_by_its_own_scale(tmp_path: Path, target: str, buffer_bytes: int) -> None:
    dtype = getattr(torch, target)
    gate, up = quantised(11, 21, 1), quantised(11, 21, 2)
    kv = quantised(21, 19, 3)
    cases = [
        ([gate], "f h", [gate[2]]),
        ([gate, up], "f h, f h -> (f (1 + 1)) h", [torch.stack([gate[2], up[2]], 1).reshape(22, 21)]),
        ([gate, up], "f h, f h -> h (f + f)", [torch.cat([gate[2].T, up[2].T], 1)]),
        (
            [kv],
            "(n (p + v)) r -> (n p) r, (n v) r",
            [
                kv[2].reshape(3, 7, 19)[:, :5].reshape(15, 19),
                kv[2].reshape(3, 7, 19)[:, 5:].reshape(6, 19),
            ],
        ),
    ]
    for tensors, line, expected in cases:
        got, _ = run(tmp_path, tensors, line, target, buffer_bytes)
        for g, e in zip(got, expected, strict=True):
            assert np.array_equal(g, words_of(e.to(dtype))), line


def test_lost_values_are_counted(tmp_path: Path) -> None:
    weight = torch.zeros(11, 21)
    weight[0, 0], weight[5, 1] = 448.0, -448.0  # two blocks of the first column of blocks
    weight[1, 20], weight[2, 20], weight[3, 3] = 2.0**-9, -(2.0**-9), 1.0
    scale = torch.ones(3, 3)
    scale[0, 0] = scale[1, 0] = 1e3  # 448 * 1000 is beyond float16
    scale[0, 2] = 1e-6  # 2**-9 * 1e-6 is below it
    for target, expected in (("float16", (2, 2)), ("bfloat16", (0, 0))):
        _, counts = run(tmp_path, [(weight.to(torch.float8_e4m3fn), scale, None)], "f h", target, 1 << 20)
        assert (sum(c.overflow for c in counts), sum(c.underflow for c in counts)) == expected
