"""``ckptbridge diff``."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click

from ckptbridge.cli.options import KeyValue, unique_keys

_CHECKPOINT = click.Path(path_type=Path)


@click.command("diff")
@click.argument("a", metavar="A", type=_CHECKPOINT)
@click.argument("b", metavar="B", type=_CHECKPOINT)
@click.option(
    "--through-table",
    is_flag=True,
    help="Compare a PyTorch with a MindSpore side. Example: Qwen3-8B qwen3.ckpt --through-table",
)
@click.option("--target", metavar="NAME", help="MindSpore's convention, without provenance. Example: --target hf")
@click.option(
    "--layout",
    metavar="KEY=VALUE",
    type=KeyValue(),
    multiple=True,
    callback=unique_keys,
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq .changes")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors. Example: --quiet && echo same")
def command(
    a: Path,
    b: Path,
    through_table: bool,
    target: str | None,
    layout: dict[str, str],
    mapping: Path | None,
    config: Path | None,
    key: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Compare two checkpoints, of any formats: names, shapes, dtypes, and values bit for bit.

    With --through-table one is PyTorch's and the other MindSpore's; the table is the one that the
    provenance names, or that --target and the config choose.

    Exit code 0: the same; 1: different; 2: they could not be compared.

    Example: ckptbridge diff before.safetensors after.ckpt
    """
    from ckptbridge.cli.show import ComparisonBar, progress_bar
    from ckptbridge.errors import UsageError
    from ckptbridge.formats.detect import open_inventory
    from ckptbridge.verification.differences import differences, differences_through_table, nbytes_compared
    from ckptbridge.verification.handoff import Overrides

    if through_table:
        overrides = Overrides(target, layout, mapping, config, key)
        with ExitStack() as stack:
            bar = ComparisonBar(stack, as_json or quiet)
            found = differences_through_table(a, b, overrides, bar.start, bar.update)
    else:
        for name, value in (("--target", target), ("--layout", layout), ("--mapping", mapping), ("--config", config)):
            if value:
                raise UsageError(f"{name} chooses a table.", remedy="Give --through-table as well.", option=name)
        one, other = open_inventory(a, key), open_inventory(b, key)
        with progress_bar(nbytes_compared(one, other), as_json or quiet) as progress:
            found = differences(one, other, progress)
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    elif not quiet:
        from ckptbridge.cli.show_difference import difference_lines

        click.echo("\n".join(difference_lines(found)))
    return found.exit_code
