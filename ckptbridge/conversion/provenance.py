"""The trail: what was converted from what, by which table, embedded in the output.

A JSON object with sorted keys: the ``append_info`` string entry of a .ckpt, the ``append_info``
metadata of a safetensors file, and ``ckptbridge.json`` in a directory. It holds no clock and no
host name, so that equal inputs and options give equal bytes. When read back it is data: nothing in
it is executed or followed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptbridge.formats.tensors import Inventory

TAG = "append_info"
FILE_NAME = "ckptbridge.json"
TOOL = "ckptbridge"
SCHEMA = 1
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Carried:
    """The provenance that a source carries.

    ``custom_table`` holds for a table that is not shipped; ``tied`` are the names that the PyTorch
    source had as equal copies, each with the name it equals; ``absent`` are the tensors that its source lacked.
    """

    record: Mapping[str, Any]
    table: str
    table_digest: str
    custom_table: bool
    layout: Mapping[str, str]
    roots: Mapping[str, str]
    config: Mapping[str, Any] | None
    tied: Mapping[str, str]
    absent: frozenset[str]

    @property
    def history(self) -> list[Any]:
        """The chain of handoffs so far, oldest first, this one last."""
        # "files" is said by a directory's ckptbridge.json only, of the directory.
        own = {k: v for k, v in self.record.items() if k not in ("history", "files")}
        earlier = self.record.get("history")
        return [*(earlier if isinstance(earlier, list) else []), own]


def dumps(record: Mapping[str, Any]) -> str:
    """A provenance record as it is embedded: sorted keys, ASCII, one line."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def read(inventory: Inventory, source: Path) -> Carried | None:
    """The provenance in a checkpoint, or beside it in the directory ``source``; None when this tool wrote none."""
    text = inventory.strings.get(TAG)
    beside = source / FILE_NAME
    if text is None and beside.is_file() and beside.stat().st_size <= MAX_BYTES:
        text = beside.read_text(encoding="utf-8", errors="replace")
    return parse(text) if text is not None else None


def parse(text: str) -> Carried | None:
    """A provenance record from its JSON, or None when it is not one of this tool's."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("tool") != TOOL or record.get("schema") != SCHEMA:
        return None
    table = record.get("table")
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        return None
    config, absent = record.get("config"), record.get("absent")
    return Carried(
        record=record,
        table=table["name"],
        table_digest=str(table.get("digest", "")),
        custom_table=table.get("shipped") is not True,
        layout=_strings(record.get("layout")),
        roots=_strings(record.get("roots")),
        config=config if isinstance(config, dict) else None,
        tied=_strings(record.get("tied")),
        absent=frozenset(name for name in (absent if isinstance(absent, list) else ()) if isinstance(name, str)),
    )


def foreign(inventory: Inventory) -> str | None:
    """An ``append_info`` that somebody else wrote, kept as text in the history."""
    text = inventory.strings.get(TAG)
    return text if text is not None and parse(text) is None else None


def _strings(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, str)}
