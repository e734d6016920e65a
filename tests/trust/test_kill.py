"""A conversion that is killed at any call that changes files leaves the former output or the whole new one.

Killed before each call in turn; or, where it writes, when half of that is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults import FEW, SCENARIOS, Scenario, drive, of_the_output, snapshot
from tiny import Sources

CASES = [(s, "kill") for s in SCENARIOS] + [(s, "torn") for s in FEW[:3]]


@pytest.mark.parametrize(("scenario", "action"), CASES, ids=[f"{s.id} {action}" for s, action in CASES])
def test_killed_anywhere(scenario: Scenario, action: str, sources: Sources, folder: Path) -> None:
    request = scenario.request(sources, folder)
    arguments = request["arguments"]
    then = arguments if "--overwrite" in arguments else [*arguments, "--overwrite"]
    answer = drive({**request, "then": then, "points": ["all", action]})
    wanted = answer["wanted"]
    assert answer["undisturbed"]["code"] == 0, answer["undisturbed"]
    assert wanted == of_the_output(wanted), "an undisturbed run leaves nothing else"
    former = snapshot_of(request)
    assert former != wanted
    seen: set[str] = set()
    for result in answer["results"]:
        assert result["code"] == -9, result
        after = of_the_output(result["after"])
        if after == wanted:
            seen.add("new")
        elif after == former:
            seen.add("former")
        else:
            # Without an exchange of names there is a moment in which the former output is in the hidden folder.
            assert not scenario.exchange, result
            assert scenario.overwrite, result
            assert after == {}, result
            hidden = {n.partition("/former/")[2]: d for n, d in result["after"].items() if "/former/" in n}
            assert hidden == {n.partition("/")[2]: d for n, d in former.items() if "/" in n}
            seen.add("put back")
        assert result["then"] == 0, result
        assert result["finally"] == wanted, result
    assert ({"new", "former"} if action == "kill" else {"former"}) <= seen
    if action == "kill":
        assert ("put back" in seen) == (scenario.overwrite and not scenario.exchange)
        assert len(answer["results"]) >= 20


def test_a_former_output_comes_back_when_nothing_replaces_it(sources: Sources, folder: Path) -> None:
    """Killed between two renames; and the next run finds that it may not overwrite."""
    (scenario,) = [s for s in SCENARIOS if s.overwrite and not s.exchange]
    request = scenario.request(sources, folder)
    calls = drive(request)["undisturbed"]["calls"]
    second = max(k for k, (name, *_) in enumerate(calls) if name == "rename")
    then = [word for word in request["arguments"] if word != "--overwrite"]
    for resume in (True, False):
        answer = drive({**request, "then": then, "resume": resume, "points": [[second, "kill"]]})
        (result,) = answer["results"]
        assert of_the_output(result["after"]) == {}
        assert result["then"] == 2
        assert "exists" in result["then_text"]
        assert of_the_output(result["finally"]) == snapshot_of(request)


def snapshot_of(request: dict[str, Any]) -> dict[str, str]:
    """What there was before: the former output, or nothing."""
    return snapshot(Path(request["former"])) if "former" in request else {}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_all_is_synced_before_the_rename_and_the_name_after_it(
    scenario: Scenario, sources: Sources, folder: Path
) -> None:
    """What a power failure would test: a rename that reaches the disk before the bytes do shows an empty file."""
    request = scenario.request(sources, folder)
    calls = drive(request)["undisturbed"]["calls"]
    destination = str(Path(request["folder"]) / scenario.out)
    renames = ("rename", "renameat2", "link")
    (commit,) = [k for k, call in enumerate(calls) if call[0] in renames and call[2] == destination]
    made = calls[commit][1]
    written = {
        files[-1]: k
        for k, (name, *files) in enumerate(calls)
        if name in ("open", "write", "pwrite", "ftruncate", "copy_file_range") and files[-1].startswith(made)
    }
    before = {files[0]: k for k, (name, *files) in enumerate(calls[:commit]) if name == "fsync"}
    assert written
    for file, k in written.items():
        assert k < before[file], file
    output = made if scenario.out == "out" else str(Path(made).parent)
    assert max(written.values()) < before[output]
    assert ["fsync", request["folder"]] in calls[commit:]
