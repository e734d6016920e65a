"""Measures ckptbridge beside durable copies, bare system calls and what people use today.

``python scripts/bench.py`` makes its inputs and prints a table of medians and spreads; nothing here fails on a
time. ``--rows fused,fp8`` chooses, ``--quick`` is a look at small sizes, ``--json FILE`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from benchmark import measure, table
from benchmark.inputs import GIB
from benchmark.rows import GROUPS, Command, Row
from benchmark.stock import Sizes, Stock

_QUIET = 0.15  # of the processors; the kernel's own writing back takes some of it
_PEER = Path(__file__).parents[1] / ".venv-peer" / "bin" / "python"


def main() -> None:
    options = _options()
    work = Path(tempfile.mkdtemp(prefix="ckptbridge-bench-", dir=options.work)) if not options.keep else options.keep
    peer = str(_PEER) if _PEER.exists() else sys.executable
    stock = Stock(work, _sizes(options), peer)
    # As in an installed package, even where Python is told to write no bytecode.
    compileall.compile_dir(Path(__file__).parents[1] / "ckptbridge", quiet=1)
    machine = {**measure.machine(), "file_system": measure.file_system(work), "page_cache": _state(options.cold)}
    print(", ".join(f"{k} {v}" for k, v in machine.items()), f"runs {options.runs}", sep=", ")
    print(f"\n{table.HEADER}")
    results, failed = [], {}
    try:
        (work / "inputs").mkdir(parents=True, exist_ok=True)
        for group in options.rows:
            for row in GROUPS[group](stock):
                try:
                    result = measured(row, options)
                except measure.CommandFailed as e:
                    failed[row.key] = str(e)
                    print(table.failed_line(row, str(e).strip().splitlines()[-1]), flush=True)
                else:
                    results.append(result)
                    print(table.line(result), flush=True)
    finally:
        if not options.keep:
            shutil.rmtree(work)
    if options.json:
        document = table.document(results, failed, machine, options.runs)
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def measured(row: Row, options: argparse.Namespace) -> table.Result:
    """Run a row and what stands beside it in turn; every run begins with nothing written and nothing waiting."""
    taken: dict[str, list[float]] = {"ours": [], "baseline": [], "bare": []}
    commands = {"ours": row.ours, "baseline": row.baseline, "bare": row.bare}
    memory, others = 0, 0.0
    for k in range(options.runs):
        order = [name for name in commands if commands[name]]
        for name in order if k % 2 else reversed(order):
            found = _undisturbed(row, commands[name] or [], options)
            others = max(others, found.others)
            taken[name].append(found.seconds)
            if name == "ours":
                memory = max(memory, found.memory)
    measure.clear(row.writes)
    ours = taken["ours"]
    if row.value == "ratio":
        values = [a / b for a, b in zip(ours, taken["baseline"], strict=True)]
    elif row.value == "difference":
        values = [a - b for a, b in zip(ours, taken["baseline"], strict=True)]
    else:
        values = ours
    return table.Result(
        row,
        measure.Spread.of(values),
        measure.Spread.of(ours),
        measure.Spread.of(taken["baseline"]) if taken["baseline"] else None,
        measure.Spread.of([a / b for a, b in zip(ours, taken["bare"], strict=True)]) if taken["bare"] else None,
        memory,
        others,
    )


def _undisturbed(row: Row, command: Command, options: argparse.Namespace) -> measure.Taken:
    """The run among up to ``--patience`` that the rest of the machine disturbed least; the first that was quiet."""
    best: measure.Taken | None = None
    for _ in range(max(1, options.patience)):
        measure.clear(row.writes)
        measure.read_through(row.reads, options.cold or row.cold)
        measure.wait_for_idle(30.0 if options.patience else 0.0)
        found = measure.run(command)
        if best is None or found.others < best.others:
            best = found
        if best.others < _QUIET:
            break
    assert best is not None
    return best


def _sizes(options: argparse.Namespace) -> Sizes:
    if options.quick:
        return Sizes(model=GIB // 4, growth=(GIB // 4, GIB // 2), tensor=GIB // 2, file=GIB)
    growth = tuple(int(g * GIB) for g in (0.5, 1.0, 2.0, 4.0, 8.0) if g <= options.growth)
    return Sizes(int(options.size * GIB), growth, int(options.tensor * GIB), int(options.file * GIB))


def _state(cold: bool) -> str:
    return "cold" if cold else "warm"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_groups, default=list(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command (default 5)")
    parser.add_argument("--size", type=float, default=2.0, help="GiB of the models (default 2)")
    parser.add_argument(
        "--growth", type=float, default=2.0, help="GiB of the largest model of the growth rows, up to 8"
    )
    parser.add_argument("--tensor", type=float, default=3.0, help="GiB of the one large tensor (default 3)")
    parser.add_argument("--file", type=float, default=10.0, help="GiB of the one large file (default 10)")
    parser.add_argument("--quick", action="store_true", help="small inputs: a look, no measurement")
    parser.add_argument("--cold", action="store_true", help="drop the inputs from the page cache before every run")
    parser.add_argument(
        "--patience",
        type=int,
        default=0,
        help="on a shared machine: wait for quiet, and try each run up to so many times",
    )
    parser.add_argument("--work", type=Path, help="where to make the scratch folder (default: the system's)")
    parser.add_argument("--keep", type=Path, help="a scratch folder to use and keep, with its inputs")
    parser.add_argument("--json", type=Path, help="write the numbers to a file")
    return parser.parse_args()


def _groups(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - GROUPS.keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return names


if __name__ == "__main__":
    main()
