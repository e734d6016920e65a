"""``ckptbridge mappings``: list, show, check and suggest tables."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ckptbridge.cli.options import KeyValue

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_CONFIG = click.Path(exists=True, path_type=Path)


@click.group("mappings")
def command() -> None:
    """The mapping tables: which there are, what they say, that they are right."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq '.tables[].family'")
def list_(as_json: bool) -> None:
    """List the shipped tables: family, target, layout options, model types.

    Example: ckptbridge mappings list
    """
    from ckptbridge.cli.show_tables import list_dict, list_lines
    from ckptbridge.tables import catalog

    tables = catalog.shipped()
    if as_json:
        click.echo(json.dumps({"tables": [list_dict(table) for table in tables]}))
    else:
        click.echo("\n".join(list_lines(tables)))


@command.command()
@click.argument("family", metavar="FAMILY[/TARGET]")
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--config", type=_CONFIG, metavar="FILE", help="Expand for a model. Example: --config hf/config.json")
@click.option(
    "--layout",
    metavar="KEY=VALUE",
    type=KeyValue(),
    multiple=True,
    help="A variant of the target, with --config; repeatable. Example: --layout attention=contiguous",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq .rules")
def show(
    family: str, target: str | None, config: Path | None, layout: tuple[tuple[str, str], ...], as_json: bool
) -> None:
    """Show a table's rules or, with a config, the tensors of both sides and their shapes.

    FAMILY is a family or a model type; without TARGET, its default target is shown. A table's
    name, as in qwen3/mindformers, says both.

    Example: ckptbridge mappings show qwen3 mindformers --config Qwen3-8B/config.json
    """
    from ckptbridge.cli import show_tables
    from ckptbridge.conversion.config import read_config
    from ckptbridge.errors import UsageError, printable
    from ckptbridge.tables import catalog
    from ckptbridge.tables.expand import expand

    family, slash, named = family.partition("/")
    if slash and target is not None:
        raise UsageError(
            f"The target is given twice: '{named}' and '{target}'.", argument="TARGET", remedy="Leave one of them out."
        )
    table = catalog.find(family, named if slash else target, asked_by="TARGET")
    if config is None:
        if layout:
            raise UsageError(
                "--layout chooses among tensors, and without a config the rules of every layout are shown.",
                option="--layout",
                remedy="Give a model's config.json with --config.",
            )
        if as_json:
            rules = [show_tables.rule_dict(rule) for rule in table.rules]
            click.echo(json.dumps({**show_tables.list_dict(table), "rules": rules}))
        else:
            click.echo("\n".join(show_tables.table_lines(table)))
        return
    values = read_config(config)
    expansion = expand(table, values, dict(layout))
    misfit = catalog.misfit(table, values)
    if as_json:
        entries = [entry.to_dict() for entry in show_tables.folded_entries(expansion.entries)]
        notes = [misfit] if misfit else []
        click.echo(json.dumps({**show_tables.list_dict(table), "entries": entries, "notes": notes}))
    else:
        if misfit:
            click.echo(f"note    {printable(misfit)}", err=True)
        click.echo("\n".join(show_tables.expansion_lines(expansion)))


@command.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, type=_FILE)
@click.option(
    "--config",
    "config_paths",
    type=_CONFIG,
    metavar="FILE",
    multiple=True,
    help="Prove on this model instead of the published ones; repeatable. Example: --config my/config.json",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq '.tables[].proved'")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but failures. Example: --quiet && echo proved")
def check(files: tuple[Path, ...], config_paths: tuple[Path, ...], as_json: bool, quiet: bool) -> int:
    """Prove tables: FILEs, or all that are shipped, in every layout.

    The configs of published models come with the tables, and a table is proved on those of its
    model types. No tensor may stand twice on a side, and the axes must fill the shapes: then the
    table is a bijection.

    Exit code 0: all hold; 1: one does not, and the counter-example is shown; 2: a file or config
    cannot be read, or does not give what the table asks for.

    Example: ckptbridge mappings check mymodel.toml --config my/config.json
    """
    from ckptbridge.cli.show_tables import checked_lines
    from ckptbridge.conversion.config import read_config
    from ckptbridge.tables.check import check as prove_table
    from ckptbridge.tables.check import tables_for
    from ckptbridge.tables.published import NamedConfig
    from ckptbridge.tables.table import load_table

    configs = [NamedConfig(str(path), read_config(path)) for path in config_paths]
    # All files are read before the first is proved: a slip of the keyboard shows at once.
    tables = [load_table(path) for path in files] or tables_for(configs)
    results = []
    for table in tables:
        fitting = configs if files else [c for c in configs if c.values.get("model_type") in table.model_types]
        result = prove_table(table, fitting)
        results.append(result)
        if not as_json and (result.counter_example is not None or not quiet):
            click.echo("\n".join(checked_lines(result, table.path if files else None)))
    if as_json:
        click.echo(json.dumps({"tables": [result.to_dict() for result in results]}))
    return 1 if any(result.counter_example is not None for result in results) else 0


@command.command()
@click.argument("pt", metavar="PT", type=click.Path(exists=True, path_type=Path))
@click.argument("ms", metavar="MS", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the table here, not to standard output. Example: -o mymodel.toml",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it is there. Example: -o mymodel.toml --overwrite")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Example: --json | jq -r .table")
def suggest(pt: Path, ms: Path, output: Path | None, overwrite: bool, as_json: bool) -> None:
    """Suggest a table for two checkpoints that no table knows.

    PT and MS are paired by name and shape. Where both hold the same weights, sampled values decide
    what is transposed, fused, interleaved or permuted; without that, MS may as well be what a fresh
    network saved. The table is a place to start: it says what was verified by value, and every
    doubtful pair stands there with its alternatives.

    Example: ckptbridge mappings suggest model.safetensors network.ckpt -o mymodel.toml
    """
    from ckptbridge.cli.show_tables import suggestion_dict, suggestion_line
    from ckptbridge.conversion.suggestion import suggest_table, write_table

    found, text = suggest_table(pt, ms)
    if output is not None:
        write_table(text, output, overwrite)
    if as_json:
        click.echo(json.dumps({**suggestion_dict(found), "table": text}))
        return
    if output is None:
        click.echo(text, nl=False)
    click.echo(suggestion_line(found, output), err=output is None)
