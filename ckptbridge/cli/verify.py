"""``ckptbridge verify`` and ``ckptbridge verify activations``."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptbridge.cli.options import KeyValue
from ckptbridge.cli.report_files import ReportFiles
from ckptbridge.errors import UsageError

if TYPE_CHECKING:
    from ckptbridge.verification.handoff import Handoff
    from ckptbridge.verification.report import VerifyReport
    from ckptbridge.verification.session import Golden

_OUT = click.Path(dir_okay=False, path_type=Path)
_MS_DEVICES = click.Choice(["CPU", "GPU", "Ascend"])
_DTYPES = ["float64", "float32", "float16", "bfloat16"]


@click.command("verify")
@click.argument("paths", metavar="[PT] [MS]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--level",
    type=click.Choice(["weights", "forward", "all"]),
    default="all",
    show_default=True,
    help="What to judge. Example: --level weights",
)
@click.option("--atol", type=float, default=1e-5, show_default=True, help="Of the logits. Example: --atol 1e-5")
@click.option("--rtol", type=float, default=0.0, show_default=True, help="Of the logits. Example: --rtol 1e-5")
@click.option("--equal-nan", is_flag=True, help="Let NaN equal NaN in the same place. Example: --equal-nan")
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="float64",
    show_default=True,
    help="The compute type; below float64 the kernels are judged too. Example: --dtype float32",
)
@click.option(
    "--tokens",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Token ids, .npy or JSON. Example: --tokens prompt.json",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Random sequences. Example: --batch 2")
@click.option("--length", type=int, help="Tokens of each; 512 where the model allows. Example: --length 128")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random tokens. Example: --seed 1")
@click.option("--device", default="cpu", show_default=True, help="PyTorch's. Example: --device cuda")
@click.option(
    "--ms-device",
    type=_MS_DEVICES,
    default="CPU",
    show_default=True,
    help="MindSpore's. Example: --ms-device Ascend",
)
@click.option("--pt-model", metavar="MODULE:FUNCTION", help="A PyTorch side of your own. Example: --pt-model mine:load")
@click.option(
    "--ms-net",
    metavar="NAME|MODULE:FUNCTION",
    help="'mindformers' (its own networks, with --dtype float32) or a network of yours. Example: --ms-net mine:load",
)
@click.option(
    "--golden",
    metavar="FILE",
    type=_OUT,
    help="Write the PyTorch side's run to FILE, or read it when it is there. Example: --golden run.golden",
)
@click.option("--prove", is_flag=True, help="Seed faults and see the verdict turn. Example: PT MS --prove")
@click.option("--report", metavar="FILE", type=_OUT, help="The report as JSON. Example: --report verify.json")
@click.option("--junit", metavar="FILE", type=_OUT, help="The report as JUnit XML. Example: --junit verify.xml")
@click.option("--html", metavar="FILE", type=_OUT, help="The report as one HTML page. Example: --html verify.html")
@click.option("--target", metavar="NAME", help="MindSpore's convention, without provenance. Example: --target hf")
@click.option(
    "--layout",
    metavar="KEY=VALUE",
    type=KeyValue(),
    multiple=True,
    help="A variant of the target; repeatable. Example: --layout mlp=contiguous",
)
@click.option(
    "--mapping",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A table of your own. Example: --mapping mymodel.toml",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(exists=True, path_type=Path),
    help="The model's config.json. Example: --config hf/config.json",
)
@click.option("--key", metavar="NAME", help="Which state dict of a .bin that holds several. Example: --key model")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON. Example: --json | jq .verdict")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors. Example: --quiet && echo holds")
def command(**options: Any) -> int:
    """Judge a handoff: every weight bit for bit, and the logits of both real backends.

    Name both checkpoints, or the one that ckptbridge wrote, or none in a folder that it wrote:
    the provenance says the rest. 'ckptbridge verify activations' compares the backends' kernels.

    Exit code 0: the claim holds; 1: it does not; 2: it could not be judged.

    Example: ckptbridge verify Qwen3-8B qwen3.ckpt --atol 1e-5
    """
    reports = ReportFiles({name: options[name] for name in ("report", "junit", "html")})
    try:
        reports.claim()
        _check_together(options)
        result = _verify(options)
    except Exception as e:
        from ckptbridge.cli.main import as_ours

        reports.write_error(options["paths"], as_ours(e))
        raise
    silent = options["quiet"] or options["as_json"]
    from ckptbridge.verification.session import Golden

    if isinstance(result, Golden):
        dtype = "" if options["dtype"] == "float64" else f" --dtype {options['dtype']}"
        if options["as_json"]:
            click.echo(json.dumps({"golden": str(result.path), "dtype": options["dtype"]}))
        elif not silent:
            click.echo(
                f"wrote {result.path}: run 'ckptbridge verify MS --golden {result.path.name}{dtype}' where MindSpore is"
            )
        return 0
    reports.write(result)
    if options["as_json"]:
        from ckptbridge.verification.report_json import to_json

        click.echo(to_json(result), nl=False)
    elif not silent:
        from ckptbridge.verification.report_text import render_text

        click.echo(render_text(result))
    return result.exit_code


def _check_together(options: dict[str, Any]) -> None:
    """Refuse what would be given in vain."""
    given = _given()
    if options["level"] == "weights":
        vain = [name for name in ("prove", "golden", "tokens", "pt_model", "ms_net") if name in given]
        if vain:
            option = f"--{vain[0].replace('_', '-')}"
            raise UsageError(
                f"{option} is of the logits, and --level weights does not compute them.",
                remedy=f"Leave {option} out, or give --level all.",
                option=option,
            )
    other_run = sorted(given & {"tokens", "batch", "length", "seed", "pt_model"})
    if options["golden"] is not None and options["golden"].exists() and other_run:
        option = f"--{other_run[0].replace('_', '-')}"
        raise UsageError(
            f"The golden file has the tokens and PyTorch's logits, so {option} would change nothing.",
            remedy=f"Leave {option} out, or name a golden file that is not there yet.",
            option=option,
        )
    if options["tokens"] is not None and given & {"batch", "length", "seed"}:
        raise UsageError(
            "--tokens says which tokens there are; --batch, --length and --seed choose random ones.",
            remedy="Give the one or the others.",
            option="--tokens",
        )


def _given() -> set[str]:
    """The options that stand on the command line."""
    context = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is source}


def _verify(options: dict[str, Any]) -> VerifyReport | Golden:
    from ckptbridge.cli.show import ComparisonBar, compared_lines
    from ckptbridge.verification.handoff import Overrides
    from ckptbridge.verification.options import ForwardOptions
    from ckptbridge.verification.session import run_verify

    names = ("atol", "rtol", "dtype", "tokens", "batch", "length", "seed", "device", "ms_device", "pt_model", "ms_net")
    forward = ForwardOptions(
        **{name: options[name] for name in (*names, "golden", "equal_nan", "prove")},
        bitwise=options["level"] == "all",
    )
    overrides = Overrides(
        options["target"], dict(options["layout"]), options["mapping"], options["config"], options["key"]
    )
    silent = options["quiet"] or options["as_json"]
    with ExitStack() as stack:
        bar = ComparisonBar(stack, silent)

        def understood(handoff: Handoff) -> None:
            if not silent:
                click.echo("\n".join(compared_lines(handoff)), err=True)
            if options["level"] != "forward":
                bar.start(handoff)

        return run_verify(options["paths"], options["level"], overrides, forward, understood, bar.update)


@click.command("activations")
@click.option("--atol", type=float, default=1e-4, show_default=True, help="Of every kernel. Example: --atol 1e-4")
@click.option("--device", default="cpu", show_default=True, help="PyTorch's. Example: --device cuda")
@click.option(
    "--ms-device", type=_MS_DEVICES, default="CPU", show_default=True, help="MindSpore's. Example: --ms-device Ascend"
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON. Example: --json | jq .holds")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors. Example: --quiet && echo holds")
def activations(atol: float, device: str, ms_device: str, as_json: bool, quiet: bool) -> int:
    """Compare the backends' kernels of SiLU, GELU, softmax, norms, RoPE and others, each with the exact value.

    Exit code 0: every kernel is within the tolerance; 1: one is not; 2: there was nothing to compare.

    Example: ckptbridge verify activations --atol 1e-4
    """
    from ckptbridge.verification import activations as kernels

    report = kernels.run(atol, device=device, ms_device=ms_device)
    if as_json:
        click.echo(json.dumps(kernels.to_dict(report)))
    elif not quiet:
        click.echo(kernels.render_text(report))
    return report.exit_code
