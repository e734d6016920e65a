"""``verify`` from paths to report: find the handoff, judge the levels that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ckptbridge
from ckptbridge.conversion.tally import Progress
from ckptbridge.errors import CoverageError, UsageError
from ckptbridge.verification.environment import environment
from ckptbridge.verification.forward import (
    ForwardOptions,
    Model,
    Reference,
    check_options,
    notes_of,
    reference_run,
    run_forward,
)
from ckptbridge.verification.handoff import Handoff, Overrides, find_handoff
from ckptbridge.verification.numerics import Action, deterministic
from ckptbridge.verification.report import ControlResult, ForwardSection, VerifyReport, WeightsSection
from ckptbridge.verification.weights import compare_weights

Level = Literal["weights", "forward", "all"]


@dataclass(frozen=True)
class Golden:
    """The outcome of writing a golden file where there is no MindSpore side to judge."""

    path: Path
    reference: Reference


def run_verify(
    paths: tuple[Path, ...],
    level: Level,
    overrides: Overrides,
    options: ForwardOptions,
    understood: Callable[[Handoff], None] | None = None,
    progress: Progress | None = None,
) -> VerifyReport | Golden:
    """Judge a handoff. A PyTorch checkpoint alone, with ``options.golden``, writes that file instead.

    ``understood`` is told what is compared, before the long work; ``progress`` the bytes of weights compared.
    Raises the error family for what cannot be judged at all; a level that does not hold is in the report.
    """
    if level in ("forward", "all"):
        check_options(options)
    handoff = find_handoff(paths, overrides, alone=options.golden is not None)
    if understood is not None:
        understood(handoff)
    weights = None
    if level in ("weights", "all") and handoff.pt is not None and handoff.ms is not None:
        weights = _weights(handoff, progress)
    forward: ForwardSection | None = None
    controls: tuple[ControlResult, ...] = ()
    actions: tuple[Action, ...] = ()
    if level in ("forward", "all"):
        model = Model(handoff.known.config or {}, handoff.known.expansion)
        if not model.config:
            raise UsageError("The forward needs the model's config.", remedy="Give --config FILE, or --level weights.")
        here = handoff.pt is not None and not (options.golden is not None and options.golden.exists())
        with deterministic(torch=here, mindspore=handoff.ms is not None) as numerics:
            reference = reference_run(handoff.pt.path if handoff.pt is not None else None, model, options)
            if handoff.ms is None:
                assert options.golden is not None
                return Golden(options.golden, reference)
            result = run_forward(handoff.ms.path, reference, model, options)
            forward, controls, actions = result.section, result.controls, tuple(numerics.actions)
    golden = f"golden file {options.golden}" if options.golden is not None else ""
    return VerifyReport(
        pytorch=str(handoff.pt.path) if handoff.pt is not None else golden,
        mindspore=str(handoff.ms.path) if handoff.ms is not None else "",
        weights=weights,
        forward=forward,
        controls=controls,
        actions=actions,
        environment=environment(options.device, options.ms_device),
        provenance=handoff.record,
        notes=(*handoff.notes, *(notes_of(options) if forward is not None else ())),
        tool=f"ckptbridge {ckptbridge.__version__}",
    )


def _weights(handoff: Handoff, progress: Progress | None) -> WeightsSection:
    other = handoff.made
    assert other is not None
    algorithm = next((d.partition(":")[0] for d in handoff.recorded.values() if d), "blake3")
    section = compare_weights(handoff.known, handoff.request, other.inventory, handoff.recorded, algorithm, progress)
    misfit = [t for t in section.tensors if t.status == "shape"]
    if misfit and len(misfit) > len(section.tensors) // 2:
        raise CoverageError(
            f"{len(misfit)} of {len(section.tensors)} tensors have other shapes than the config gives, "
            f"first '{misfit[0].name}': {misfit[0].note}. The two are of different models or configs.",
            remedy="Name the checkpoint that belongs to this config, or give --config.",
            file=other.path,
        )
    return section
