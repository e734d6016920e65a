"""``verify`` from paths to report: find the handoff, judge the levels that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ckptbridge
from ckptbridge.conversion.tally import Progress
from ckptbridge.errors import CkptBridgeError, CoverageError, UsageError
from ckptbridge.verification.environment import environment
from ckptbridge.verification.handoff import Handoff, Overrides, find_handoff
from ckptbridge.verification.options import ForwardOptions
from ckptbridge.verification.report import ControlResult, ForwardSection, VerifyReport, WeightsSection
from ckptbridge.verification.weights import compare_weights, content_of

# The forward level is imported where it is judged: the weights level alone should not wait for it.
if TYPE_CHECKING:
    from ckptbridge.verification.forward import Reference
    from ckptbridge.verification.numerics import Action

Level = Literal["weights", "forward", "all"]


@dataclass(frozen=True)
class Golden:
    """The outcome of writing a golden file where there is no MindSpore side to judge."""

    path: Path
    reference: Reference


@dataclass(frozen=True)
class _Forward:
    """What the forward level adds to a report; nothing where it was not asked for."""

    section: ForwardSection | None = None
    controls: tuple[ControlResult, ...] = ()
    actions: tuple[Action, ...] = ()
    notes: tuple[str, ...] = ()


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
    judges_forward = level in ("forward", "all")
    if judges_forward:
        from ckptbridge.verification.forward import check_options

        check_options(options)
    handoff = find_handoff(paths, overrides, alone=options.golden is not None)
    if options.golden is not None and judges_forward:
        from ckptbridge.verification.golden import check_golden

        check_golden(options.golden, reading=handoff.ms is not None, writing=handoff.pt is not None)
    if understood is not None:
        understood(handoff)
    weights = None
    if level in ("weights", "all") and handoff.pt is not None and handoff.ms is not None:
        weights = _weights(handoff, progress)
    judged = _forward(handoff, options, weights) if judges_forward else _Forward()
    if isinstance(judged, Golden):
        return judged
    golden = f"golden file {options.golden}" if options.golden is not None else ""
    return VerifyReport(
        pytorch=str(handoff.pt.path) if handoff.pt is not None else golden,
        mindspore=str(handoff.ms.path) if handoff.ms is not None else "",
        weights=weights,
        forward=judged.section,
        controls=judged.controls,
        actions=judged.actions,
        environment=environment(options.device, options.ms_device),
        provenance=handoff.record,
        notes=(*handoff.notes, *judged.notes),
        tool=f"ckptbridge {ckptbridge.__version__}",
    )


def unjudged(paths: tuple[Path, ...], error: CkptBridgeError) -> VerifyReport:
    """The report of a handoff that could not be judged."""
    named = [str(path) for path in paths[:2]]
    pytorch, mindspore = (*named, "", "")[:2]
    return VerifyReport(pytorch, mindspore, error=str(error), tool=f"ckptbridge {ckptbridge.__version__}")


def _forward(handoff: Handoff, options: ForwardOptions, weights: WeightsSection | None) -> _Forward | Golden:
    """Run both sides and judge the logits, or write the golden file where there is no MindSpore side."""
    from ckptbridge.verification.forward import Model, reference_run, run_forward
    from ckptbridge.verification.numerics import deterministic

    model = Model(handoff.known.config or {}, handoff.known.expansion)
    if not model.config:
        raise UsageError("The forward needs the model's config.", remedy="Give --config FILE, or --level weights.")
    content = _content(handoff, weights) if options.golden is not None else ""
    reads_golden = options.golden is not None and options.golden.exists()
    here = handoff.pt is not None and not reads_golden
    with deterministic(torch=here, mindspore=handoff.ms is not None) as numerics:
        reference = reference_run(handoff.pt.path if handoff.pt is not None else None, model, options, content)
        if handoff.ms is None:
            assert options.golden is not None
            return Golden(options.golden, reference)
        result = run_forward(handoff.ms.path, reference, model, options)
        notes = tuple(_forward_notes(handoff, options, reads_golden, reference.belongs))
        return _Forward(result.section, result.controls, tuple(numerics.actions), notes)


def _content(handoff: Handoff, weights: WeightsSection | None) -> str:
    """The content digest of the PyTorch side: of its file where it is here, else as the provenance records it."""
    if weights is not None:
        return weights.digests["PyTorch"]
    return content_of(handoff.pt.inventory) if handoff.pt is not None else handoff.recorded.get("pt", "")


def _forward_notes(handoff: Handoff, options: ForwardOptions, reads_golden: bool, belongs: bool) -> Iterator[str]:
    from ckptbridge.verification.forward import notes_of

    yield from notes_of(options)
    if options.golden is not None:
        yield (
            f"The PyTorch side's logits are those of the golden file {options.golden}."
            if reads_golden
            else f"The PyTorch side's run was written to the golden file {options.golden}."
        )
    if not belongs:
        yield "No digest tells whether the golden file was written from the checkpoint that was handed over."
    lossy = handoff.record.get("lossy")
    for step in lossy if isinstance(lossy, list) else []:
        if isinstance(step, dict):
            yield (
                f"The conversion declares a lossy step, {step.get('step')} {step.get('from')} -> {step.get('to')}: "
                "the logits show what it costs."
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
