"""Several conversions to one destination: one wins, the others are told, and nothing is mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import FEW, Scenario, drive, of_the_output
from tiny import Sources


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("scenario", FEW, ids=lambda s: f"{s.direction} {s.out}")
def test_one_wins(scenario: Scenario, overwrite: bool, sources: Sources, folder: Path) -> None:
    request = scenario.request(sources, folder)
    request["planned"] = False
    arguments = request["arguments"]
    if not overwrite:
        del request["former"]
        arguments.remove("--overwrite")
    racing = [[*arguments, "--provenance", f"run={k}"] for k in range(3)]
    wholes = [drive({**request, "arguments": a})["wanted"] for a in racing]
    assert len({str(whole) for whole in wholes}) == 3
    told = 0
    for done in drive({**request, "race": racing, "rounds": 8})["rounds"]:
        assert done["after"] in wholes, done
        assert done["after"] == of_the_output(done["after"])
        winners = done["codes"].count(0)
        assert winners >= 1
        assert overwrite or winners == 1
        for code, text in zip(done["codes"], done["texts"], strict=True):
            if code:
                told += 1
                assert code == 2
                assert any(t in text for t in ("Another conversion is writing", "exists", "appeared")), text
    assert told
