"""A conversion that is told to stop says what is kept, and --resume goes on to the same bytes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_hf
from faults import FEW, Scenario, drive, of_the_output
from tiny import CONFIG, SHAPES, Sources

SHARDS = FEW[1]
FILE = FEW[0]


def hidden(snapshot: dict[str, str]) -> set[str]:
    return snapshot.keys() - of_the_output(snapshot).keys()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("scenario", FEW, ids=lambda s: s.id)
def test_stopped_anywhere(scenario: Scenario, name: str, sources: Sources, folder: Path) -> None:
    request = scenario.request(sources, folder)
    step = {"step": 4 if name == "SIGTERM" else 2}
    answer = drive({**request, **step, "then": request["arguments"], "resume": True, "points": ["all", name]})
    wanted = answer["wanted"]
    kept = complete = 0
    for result in answer["results"]:
        assert result["code"] == 128 + signal.Signals[name], result
        assert f"Stopped by {name}" in result["text"]
        after = of_the_output(result["after"])
        if "complete by then" in result["text"]:
            complete += 1
            assert after == wanted
            assert not hidden(result["after"])
        else:
            assert after.keys() == wanted.keys()
            assert after != wanted
        # What the message says is what is there.
        assert bool(hidden(result["after"])) == ("--resume" in result["text"]), result
        assert not hidden(result["after"]) or "Nothing was left behind" not in result["text"]
        if hidden(result["after"]):
            kept += 1
            assert ".ckptbridge-" in result["text"]
            assert "of them by an earlier run" in result["then_text"]
        assert result["then"] == 0, result
        assert result["finally"] == wanted, result
    assert kept
    assert complete


def test_what_is_finished_is_not_written_again(sources: Sources, folder: Path) -> None:
    request = SHARDS.request(sources, folder)
    calls = [name for name, *_ in drive(request)["undisturbed"]["calls"]]
    seal = len(calls) - 1 - calls[::-1].index("pwrite")  # all bytes of all shards are in place by then
    answer = drive({**request, "then": request["arguments"], "resume": True, "points": [[seal, "kill"]]})
    (result,) = answer["results"]
    assert result["finally"] == answer["wanted"]
    again = [name for name, *_ in result["then_calls"]]
    assert "copy_file_range" not in again
    assert again.count("pwrite") == len([name for name in answer["wanted"] if name.endswith(".safetensors")])


@pytest.mark.parametrize("action", ["SIGINT", "kill"])
def test_a_run_that_resumes_is_stopped_itself(action: str, sources: Sources, folder: Path) -> None:
    """Wherever that is, what the first run finished stays."""
    request = SHARDS.request(sources, folder)
    calls = [name for name, *_ in drive(request)["undisturbed"]["calls"]]
    seal = len(calls) - 1 - calls[::-1].index("pwrite")
    stops = {**request, "then": request["arguments"], "resume": True, "points": [[seal, "kill"]]}
    last = [name for name, *_ in drive(stops)["results"][0]["then_calls"]].index("renameat2")
    for at in range(0, last, 4):
        answer = drive({**stops, "between": [at, action]})
        (result,) = answer["results"]
        assert result["between"] in (130, -9), result
        assert hidden(result["after"])
        # Before it has looked at what is there, it says nothing of it.
        assert action == "kill" or at < 3 or "--resume" in result["between_text"], result
        assert "Nothing was left behind" not in result["between_text"]
        assert result["then"] == 0
        assert result["finally"] == answer["wanted"]
        assert "of them by an earlier run" in result["then_text"]
        assert "copy_file_range" not in [name for name, *_ in result["then_calls"]]


# --- what cannot be resumed ------------------------------------------------------------------


@pytest.fixture
def stopped(sources: Sources, folder: Path) -> dict[str, Any]:
    """A directory conversion that was killed when all shards were in place but not sealed; the request to go on."""
    request = SHARDS.request(sources, folder)
    calls = [name for name, *_ in drive(request)["undisturbed"]["calls"]]
    seal = len(calls) - 1 - calls[::-1].index("pwrite")
    wanted = drive({**request, "points": [[seal, "kill"]]})["wanted"]
    arguments = [*request["arguments"], "--resume"]
    return {"request": {**request, "arguments": arguments, "as_it_is": True, "points": []}, "wanted": wanted}


def partial(stopped: dict[str, Any]) -> Path:
    (found,) = Path(stopped["request"]["folder"]).glob(".ckptbridge-*")
    return found


def go_on(stopped: dict[str, Any], *more: str) -> tuple[int, str, dict[str, str]]:
    request = stopped["request"]
    answer = drive({**request, "arguments": [*request["arguments"], *more]})
    return answer["undisturbed"]["code"], answer["undisturbed"]["text"], answer["wanted"]


def test_a_damaged_shard_is_written_again(stopped: dict[str, Any]) -> None:
    shard = sorted((partial(stopped) / "output").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, text, after = go_on(stopped)
    assert code == 0
    assert "of them by an earlier run" in text  # the other shards
    assert after == stopped["wanted"]


def test_missing_short_and_foreign_files_do_no_harm(stopped: dict[str, Any]) -> None:
    output = partial(stopped) / "output"
    first, second, *_ = sorted(output.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    (output / "foreign").write_text("not of this output")
    (output / "folder").mkdir()
    code, _, after = go_on(stopped)
    assert code == 0
    assert after == stopped["wanted"]


@pytest.mark.parametrize(
    "damage",
    [b"", b"\n", b"{}\n", b"[]\n", b"null\n", b"\xff\xfe\n", b'{"schema": 1}\n', b"[" * 100_000 + b"\n"],
    ids=lambda d: repr(d[:12]),
)
def test_a_journal_that_is_not_one(stopped: dict[str, Any], damage: bytes) -> None:
    journal = partial(stopped) / "journal"
    journal.write_bytes(damage)
    code, text, after = go_on(stopped)
    if code == 2:
        # It may be another conversion's; what that one finished is not thrown away unasked.
        assert "belongs to another conversion" in text
        assert journal.read_bytes() == damage
        request = stopped["request"]
        request["arguments"].remove("--resume")
        code, text, after = go_on(stopped)
    else:
        assert "There was nothing to resume" in text
    assert code == 0
    assert after == stopped["wanted"]


def test_lines_of_a_journal_that_are_none(stopped: dict[str, Any]) -> None:
    journal = partial(stopped) / "journal"
    head, *lines = journal.read_bytes().splitlines(keepends=True)
    entry = json.loads(lines[0])
    strange = [{**entry, "stretch": value} for value in ("x", None, [], -1, 10**30)]
    strange += [{**entry, "content": None}, {**entry, "overflow": "many"}, {}, [], 7, None]
    made = [json.dumps(value).encode() + b"\n" for value in strange]
    journal.write_bytes(b"".join([head, *made, b"\x00\n", *lines[1:], lines[0][:10]]))
    code, _, after = go_on(stopped)
    assert code == 0
    assert after == stopped["wanted"]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--provenance", "run=2"), "provenance was"),
        (("--dtype", "bfloat16", "--allow-overflow"), "dtype was null"),
        (("--max-shard-size", "7000"), "max_shard_size was 6000 and is 7000"),
        (("--digest", "sha256"), "digest was"),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_other_options_are_refused_and_told(stopped: dict[str, Any], more: tuple[str, ...], what: str) -> None:
    before = sorted(partial(stopped).rglob("*"))
    code, text, _ = go_on(stopped, *more)
    assert code == 2
    assert what in text
    assert "leave --resume out" in text
    assert sorted(partial(stopped).rglob("*")) == before
    code, _, after = go_on(stopped)  # and still the first one can be gone on with
    assert code == 0
    assert after == stopped["wanted"]


def test_a_source_or_table_that_changed_is_refused(stopped: dict[str, Any], sources: Sources) -> None:
    source = sources.hf / "model.safetensors"
    data, times = source.read_bytes(), source.stat()
    source.write_bytes(data)
    try:
        code, text, _ = go_on(stopped)
    finally:
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert code == 2
    assert "source's files" in text
    table = sources.table.read_text()
    sources.table.write_text(table.replace("qk.weight", "kq.weight"))
    try:
        code, text, _ = go_on(stopped)
    finally:
        sources.table.write_text(table)
    assert code == 2
    assert "table" in text


def test_without_digests_nothing_is_kept(sources: Sources, folder: Path) -> None:
    request = SHARDS.request(sources, folder)
    request["arguments"] += ["--digest", "none"]
    every = {"step": 4, "points": ["all", "SIGINT"]}
    answer = drive({**request, **every, "then": request["arguments"], "resume": True})
    for result in answer["results"]:
        assert not hidden(result["after"])
        assert "--resume" not in result["text"]
        assert result["finally"] == answer["wanted"]
        assert "nothing of it can be checked" in result["then_text"]


def test_without_resume_a_leftover_goes(stopped: dict[str, Any]) -> None:
    stopped["request"]["arguments"].remove("--resume")
    code, text, after = go_on(stopped)
    assert code == 0
    assert "earlier run" not in text
    assert after == stopped["wanted"]


def test_resume_without_a_leftover_says_so(sources: Sources, folder: Path) -> None:
    request = FILE.request(sources, folder)
    answer = drive({**request, "arguments": [*request["arguments"], "--resume"]})
    assert answer["undisturbed"]["code"] == 0
    assert "There was nothing to resume: no earlier run left" in answer["undisturbed"]["text"]


def test_what_casts_lost_is_remembered(sources: Sources, folder: Path) -> None:
    values = {name: np.full(shape, 1e30, np.float32) for name, shape in SHAPES.items()}
    source = save_hf(folder / "large", values, CONFIG)
    arguments = ["convert", "pt2ms", str(source), str(folder / "here" / "out"), "--mapping", str(sources.table)]
    arguments += ["--format", "safetensors", "--max-shard-size", "4000", "--dtype", "float16", "--allow-overflow"]
    request = {"folder": str(folder / "here"), "arguments": arguments, "then": arguments, "resume": True}
    answer = drive({**request, "planned": True, "stretch": 4000, "step": 4, "points": ["all", "SIGTERM"]})
    count = sum(value.size for value in values.values())
    for result in answer["results"]:
        assert result["finally"] == answer["wanted"]
        if "complete by then" not in result["text"]:
            assert f"{count} value(s) became infinite" in result["then_text"]
