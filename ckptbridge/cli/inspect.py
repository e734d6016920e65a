"""``ckptbridge inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("inspect")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option("--tensors", metavar="GLOB", help="Only the tensors of these names. Example: --tensors '*.norm.*'")
@click.option("--stats", is_flag=True, help="Min, max, mean, std, zeros, NaN and Inf of each tensor. Example: --stats")
@click.option("--tree", "as_tree", is_flag=True, help="The names as a tree. Example: model.ckpt --tree")
@click.option(
    "--key", metavar="NAME", help="Which state dict of a .bin that holds several. Example: --key ema.state_dict"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq .parameters")
def command(path: Path, tensors: str | None, stats: bool, as_tree: bool, key: str | None, as_json: bool) -> None:
    """Look into a checkpoint: format, size, history, which tables fit, and the tensors, layers folded.

    PATH is a safetensors, .ckpt or .bin file, an index, or a directory that holds one. Only headers
    are read, except for --stats.

    Example: ckptbridge inspect Qwen3-8B --tensors '*.q_proj.weight' --stats
    """
    from ckptbridge.conversion.inspection import inspect_inventory, open_for_inspection, selected
    from ckptbridge.errors import UsageError

    if stats and as_tree:
        raise UsageError("--stats and --tree exclude each other.", remedy="Give one of them.", option="--tree")
    inventory = open_for_inspection(path, key)
    if stats:
        from ckptbridge.cli.show import progress_bar

        nbytes = sum(spec.nbytes for spec in selected(inventory, tensors))
        with progress_bar(nbytes, as_json) as progress:
            found = inspect_inventory(inventory, path, tensors, stats, progress)
    else:
        found = inspect_inventory(inventory, path, tensors)
    if as_json:
        click.echo(json.dumps(found.to_dict()))
        return
    from ckptbridge.cli.show_inspection import inspection_lines

    click.echo("\n".join(inspection_lines(found, as_tree)))
