"""What people use today, each timed around its call alone: ``peers.py NAME SRC DST`` prints the seconds.

Imports and the making of what a call takes do not count, which favours the peers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def mindspore_save(source: Path, destination: Path) -> float:
    """``mindspore.save_checkpoint`` of float32 parameters, synced."""
    import mindspore
    import safetensors.numpy

    arrays = {n: a for f in _files(source) for n, a in safetensors.numpy.load_file(f).items()}
    parameters = [{"name": n, "data": mindspore.Tensor(a)} for n, a in arrays.items()]
    return _timed(lambda: (mindspore.save_checkpoint(parameters, str(destination)), _sync(destination)))


def mindspore_load(source: Path, destination: Path) -> float:
    """``mindspore.load_checkpoint`` of a .ckpt."""
    import mindspore

    return _timed(lambda: mindspore.load_checkpoint(str(source)))


def safetensors_load_save(source: Path, destination: Path) -> float:
    """``safetensors.torch.load_file`` of each file and ``save_file`` of what it held, synced."""
    from safetensors.torch import load_file, save_file

    destination.mkdir()

    def copy() -> None:
        for file in _files(source):
            save_file(load_file(file), destination / file.name)
            _sync(destination / file.name)

    return _timed(copy)


def mindformers(source: Path, destination: Path) -> float:
    """MindFormers' own converter of Llama checkpoints, synced."""
    from mindformers.models.llama.convert_weight import convert_pt_to_ms

    return _timed(lambda: (convert_pt_to_ms(input_path=str(source), output_path=str(destination)), _sync(destination)))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    calls = {f.__name__: f for f in (mindspore_save, mindspore_load, safetensors_load_save, mindformers)}
    print(f"seconds {calls[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))}")
