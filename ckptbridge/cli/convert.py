"""``ckptbridge convert pt2ms`` and ``convert ms2pt``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ckptbridge.cli.options import KeyValue, Size, unique_keys
from ckptbridge.conversion.plan import FORMATS, Direction
from ckptbridge.errors import printable

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("source", metavar="SRC", type=click.Path(path_type=Path)),
    click.argument("destination", metavar="DST", type=click.Path(path_type=Path)),
    click.option("--target", metavar="NAME", help="The MindSpore side's convention. Example: --target mindformers"),
    click.option(
        "--layout",
        metavar="KEY=VALUE",
        type=KeyValue(),
        multiple=True,
        callback=unique_keys,
        help="A variant of the target; repeatable. Example: --layout attention=contiguous",
    ),
    click.option(
        "--mapping",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A mapping table of your own. Example: --mapping mymodel.toml",
    ),
    click.option(
        "--config",
        metavar="FILE",
        type=click.Path(exists=True, path_type=Path),
        help="The model's config.json, where none lies beside the weights. Example: --config hf/config.json",
    ),
    click.option(
        "--dtype", metavar="NAME", help="Cast floating tensors, rounding to nearest even. Example: --dtype bfloat16"
    ),
    click.option(
        "--allow-overflow",
        is_flag=True,
        help="Accept values that a cast turns into infinity or zero. Example: --dtype float16 --allow-overflow",
    ),
    click.option(
        "--dry-run", is_flag=True, help="Print the plan as a table, write nothing. Example: SRC DST --dry-run"
    ),
    click.option(
        "--allow-missing",
        metavar="GLOB",
        multiple=True,
        help="Tensors that may be missing; repeatable. Example: --allow-missing 'lm_head.*'",
    ),
    click.option(
        "--allow-unexpected",
        metavar="GLOB",
        multiple=True,
        help="Tensors outside the table to leave out; repeatable. Example: --allow-unexpected 'ema.*'",
    ),
    click.option(
        "--provenance",
        metavar="KEY=VALUE",
        type=KeyValue(),
        multiple=True,
        callback=unique_keys,
        help="A note to embed in the output; repeatable. Example: --provenance run=42",
    ),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace a file, or a folder that a conversion wrote. Example: SRC DST --overwrite",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with what a stopped run had finished, else removed. Example: SRC DST --resume",
    ),
    click.option(
        "--key", metavar="NAME", help="Which state dict of a .bin that holds several. Example: --key ema.state_dict"
    ),
    click.option(
        "--digest",
        type=click.Choice(["blake3", "sha256", "none"]),
        default="blake3",
        show_default=True,
        help="The digest of sources and contents in the provenance. Example: --digest sha256",
    ),
    click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else. Example: --json | jq .bytes"
    ),
    click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors. Example: --quiet && echo done"),
]


def _format_option(direction: Direction) -> Callable[[Any], Any]:
    """``--format`` with what the direction writes, the default first."""
    formats = FORMATS[direction]
    return click.option(
        "--format",
        "format_",
        type=click.Choice(formats),
        help=f"The format of a directory's weights, {formats[0]} without it. Example: --format {formats[1]}",
    )


def _shard_option(help_text: str) -> Callable[[Any], Any]:
    return click.option("--max-shard-size", metavar="SIZE", type=Size(), help=help_text)


_PT2MS_ONLY: list[Callable[[Any], Any]] = [
    _format_option("pt2ms"),
    _shard_option(
        "Cut a directory of safetensors into shards; a .ckpt has none. "
        "Example: --format safetensors --max-shard-size 5GB"
    ),
    click.option(
        "--crc", is_flag=True, help="Append MindSpore's crc trailer to a .ckpt. Example: model model.ckpt --crc"
    ),
    click.option(
        "--keep-quantized",
        is_flag=True,
        help="Keep float8 words and their scales. Example: --format safetensors --keep-quantized",
    ),
]

_MS2PT_ONLY: list[Callable[[Any], Any]] = [
    _format_option("ms2pt"),
    _shard_option("Cut a directory into shards. Example: --max-shard-size 5GB"),
]


def _with(options: list[Callable[[Any], Any]]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.group("convert")
def command() -> None:
    """Convert a checkpoint from one side to the other.

    SRC is a directory or a file, recognised by its content. DST ending in .ckpt, .safetensors,
    .bin, .pt or .pth is written as one file; under any other name a directory is created.
    """


@command.command()
@_with(_OPTIONS)
@_with(_PT2MS_ONLY)
def pt2ms(**options: Any) -> None:
    """From PyTorch to MindSpore.

    DST ending in .ckpt or .safetensors is one file, else a directory.

    Example: ckptbridge convert pt2ms Qwen3-8B qwen3.ckpt --target mindformers
    """
    _convert("pt2ms", **options)


@command.command()
@_with(_OPTIONS)
@_with(_MS2PT_ONLY)
def ms2pt(**options: Any) -> None:
    """From MindSpore to PyTorch.

    Target, layout and config come from the provenance in the source, where it has one.
    DST ending in .safetensors, .bin, .pt or .pth is one file, else a directory.

    Example: ckptbridge convert ms2pt qwen3.ckpt Qwen3-8B-tuned
    """
    _convert("ms2pt", crc=False, keep_quantized=False, **options)


def _convert(direction: Direction, *, dry_run: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    from ckptbridge.cli.show import plan_table, progress_bar, summary_line, understood_lines
    from ckptbridge.conversion.planner import make_plan
    from ckptbridge.conversion.replacing import check_destination
    from ckptbridge.conversion.request import Request
    from ckptbridge.conversion.run import room_needed, run

    request = Request(
        direction=direction,
        source=options["source"],
        destination=options["destination"],
        target=options["target"],
        layout=options["layout"],
        mapping=options["mapping"],
        config=options["config"],
        format=options["format_"],
        dtype=options["dtype"],
        keep_quantized=options["keep_quantized"],
        max_shard_size=options["max_shard_size"],
        allow_missing=options["allow_missing"],
        allow_unexpected=options["allow_unexpected"],
        allow_overflow=options["allow_overflow"],
        provenance=options["provenance"],
        overwrite=options["overwrite"],
        resume=options["resume"],
        crc=options["crc"],
        digest=options["digest"],
        key=options["key"],
    )
    plan = make_plan(request)
    check_destination(plan.destination, plan.directory, request.overwrite)
    silent = quiet or as_json
    if dry_run:
        if as_json:
            click.echo(json.dumps({**plan.to_dict(), "room": room_needed(plan)}))
        elif not quiet:
            click.echo(plan_table(plan, room_needed(plan)))
        return
    if not silent:
        for line in understood_lines(plan):
            click.echo(line, err=True)
    with progress_bar(plan.nbytes, silent) as progress:
        summary = run(plan, request, progress)
    if as_json:
        click.echo(json.dumps(summary.to_dict()))
    elif not quiet:
        for note in summary.notes:
            click.echo(f"note    {printable(note)}", err=True)
        click.echo(summary_line(summary))
