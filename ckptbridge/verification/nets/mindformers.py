"""MindFormers' own networks as the MindSpore side: ``--ms-net mindformers``.

The network is built from the config for the checkpoint's target and layout, loaded by MindSpore itself,
strictly, in the dtypes of the file, and only then cast to float32. On the CPU the kernels that exist on
Ascend only have stand-ins (:mod:`.mindformers_kernels`). Written for MindFormers 2.1.0.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ckptbridge.errors import BackendError, CoverageError, FormatError, ShapeError, UnsupportedError
from ckptbridge.verification.nets.families import model_spec
from ckptbridge.verification.nets.mindformers_kernels import stand_ins
from ckptbridge.verification.nets.mindformers_networks import NETWORKS, OWN, known_differences, refuse
from ckptbridge.verification.nets.spec import DecoderSpec
from ckptbridge.verification.sides.mindspore import backend, first_line, load_files, some
from ckptbridge.verification.sides.stages import Stages, check_tokens

INSTALL = "pip install --no-deps mindformers==2.1.0"
# Parameters that are training state: counts of the router, zero at the start, read by no forward.
_STATE = (".expert_load", ".fi_accu")


@dataclass(frozen=True, slots=True)
class MindFormersSide:
    """A loaded MindFormers network. ``notes``: where it is known to differ from transformers' on equal weights."""

    spec: DecoderSpec
    network: Any
    notes: tuple[str, ...]

    def forward(self, tokens: NDArray[Any]) -> Stages:
        """The logits for ``tokens``, integers (B, T) of the length that the network was built for."""
        import mindspore as ms

        ids = check_tokens(tokens, self.spec.vocab)
        try:
            with _quiet(), stand_ins():
                result = self.network(ms.Tensor(ids, ms.int32))
                logits = result[0] if isinstance(result, tuple) else result
                values = logits.astype(ms.float32).asnumpy().reshape(*ids.shape, -1)
        # It is MindFormers' code: whatever it raises is reported as its failure.
        except Exception as error:
            raise _failed("computes no forward", error) from error
        return Stages({"logits": values}, {"logits": ()})


def check_installed() -> None:
    """Raises BackendError when MindFormers is not there; imports nothing."""
    if find_spec("mindformers") is None:
        raise BackendError(
            "--ms-net mindformers needs the package 'mindformers', and it is not installed.",
            remedy=f"Install it beside MindSpore: {INSTALL}; its import says what else it wants.",
        )


def load(
    path: Path,
    config: Mapping[str, Any],
    target: str,
    layout: Mapping[str, str],
    shape: tuple[int, int],
    device: str = "CPU",
) -> MindFormersSide:
    """MindFormers' network for ``target`` and ``layout``, with the weights of ``path``, for tokens of ``shape`` (B, T).

    Raises UnsupportedError for a family, target or feature without a network here, CoverageError and
    ShapeError when the file does not fit the network, FormatError when MindSpore cannot read it,
    BackendError when MindFormers is missing or fails.
    """
    check_installed()
    build = NETWORKS.get((str(config.get("model_type")), target))
    if build is None:
        there = ", ".join(f"{family} ({name})" for family, name in NETWORKS)
        raise UnsupportedError(
            f"No MindFormers network is set up for model type '{config.get('model_type')}' and target '{target}'.",
            remedy=f"There are: {there}. {OWN}",
        )
    spec = model_spec(config)
    assert isinstance(spec, DecoderSpec)
    refuse(spec)
    ms = backend(device)
    loaded = {name: value for name, value in load_files(ms, path).items() if not name.startswith("mtp.")}
    with _quiet(), _context(legacy=False), stand_ins(), _context(legacy=target == "mindformers-legacy"):
        try:
            network = build(spec, layout, shape)
            network.set_train(False)
        except UnsupportedError:
            raise
        except Exception as error:  # MindFormers' code
            raise _failed("cannot be built from this config", error) from error
    _fill(ms, network, loaded, path)
    return MindFormersSide(spec, network, known_differences(spec, loaded))


# --- loading ----------------------------------------------------------------------------------


def _fill(ms: Any, network: Any, loaded: Mapping[str, Any], path: Path) -> None:
    """The file's tensors into the network's parameters, strictly, then float32.

    MindSpore's own check is weaker: it warns of missing tensors, and lets trailing axes of one pass.
    """
    parameters = {p.name: p for p in network.get_parameters() if not p.name.endswith(_STATE)}
    missing = [name for name in parameters if name not in loaded]
    unknown = [name for name in loaded if name not in parameters and loaded[name].shape != ()]
    if missing or unknown:
        parts = [f"{some(names)} {what}" for names, what in ((missing, "missing"), (unknown, "unexpected")) if names]
        raise CoverageError(
            f"The MindSpore checkpoint does not fit MindFormers' network: {'; '.join(parts)}.",
            remedy="Check that config, --target and --layout are those that the checkpoint was written for.",
            file=path,
        )
    for name, parameter in parameters.items():
        if tuple(loaded[name].shape) != tuple(parameter.shape):
            raise ShapeError(
                f"MindFormers' network has shape {tuple(parameter.shape)} and the file {tuple(loaded[name].shape)}.",
                remedy="Check that config, --target and --layout are those that the checkpoint was written for.",
                tensor=name,
                file=path,
            )
        parameter.set_dtype(loaded[name].dtype)
    try:
        # A network's training state is not in the file, and would be reported as missing.
        state = {p.name: p for p in network.get_parameters() if p.name.endswith(_STATE)}
        left, extra = ms.load_param_into_net(
            network, {**{name: loaded[name] for name in parameters}, **state}, strict_load=True
        )
    except (RuntimeError, TypeError) as error:
        raise FormatError(f"MindSpore does not load this checkpoint: {first_line(error)}.", file=path) from error
    if left or extra:
        raise CoverageError(
            f"MindSpore left tensors unloaded: {some(left)} missing, {some(extra)} unexpected.", file=path
        )
    for parameter in parameters.values():
        parameter.set_dtype(ms.float32)


@contextmanager
def _context(*, legacy: bool) -> Iterator[None]:
    """MindFormers' process-wide switch between its older and its current networks, put back on leaving.

    Its import comes first, without the older ones: the switch decides too what its modules define.
    """
    try:
        from mindformers import MindFormerConfig
        from mindformers.core.context.build_context import MFContextOperator, is_legacy_model
    except Exception as error:  # its import takes many packages, and fails for want of any
        raise BackendError(
            f"MindFormers cannot be imported: {first_line(error)}.",
            remedy=f"It was tried as 2.1.0 beside MindSpore 2.10: {INSTALL}, then what its import asks for.",
        ) from error

    def switch(value: bool) -> None:
        MFContextOperator.reset_instance()
        MFContextOperator(MindFormerConfig(use_legacy=value, context={}, parallel={}))

    before = is_legacy_model()
    switch(legacy)
    try:
        yield
    finally:
        switch(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """MindFormers prints and logs to standard output, where the report goes, and logs to ./output: neither here."""
    name = "LOG_MF_PATH"  # read anew at each line that it logs
    given, disabled = os.environ.get(name), logging.root.manager.disable
    os.environ[name] = _log_folder().name
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(disabled)
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given


@cache
def _log_folder() -> tempfile.TemporaryDirectory[str]:
    """Its log files stay open as long as the process, so one folder; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="ckptbridge-", ignore_cleanup_errors=True)


def _failed(what: str, error: Exception) -> BackendError:
    return BackendError(
        f"MindFormers' network {what}: {type(error).__name__}: {first_line(error)}.",
        remedy=f"It was tried with MindFormers 2.1.0 and MindSpore 2.10 on the CPU. {OWN}",
    )
