"""The pinned findings in public repositories: their form always, themselves where checkouts are at hand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import real_code
from bases import ONE_PROCESS
from lockstep_lint.rules import all_rules

CHECKOUTS = os.environ.get("LOCKSTEP_LINT_CHECKOUTS")


def test_form() -> None:
    pins = real_code.read()
    assert len(pins) >= 20
    assert real_code.as_text(pins) == real_code.PINS.read_text(encoding="utf-8")
    assert len({pin["repository"] for pin in pins}) == len(pins)
    for pin in pins:
        assert set(pin) == {"repository", "commit", "findings", "listed"}
        assert re.fullmatch("[0-9a-f]{40}", pin["commit"]), pin["repository"]
        for each in pin["findings"]:
            assert set(each) == {"path", "line", "code", "verdict", "listed"}
            assert each["verdict"] in real_code.VERDICTS[:3]  # all have been read
            assert each["code"] in all_rules()
        for each in pin["listed"]:
            assert set(each) == {"path", "line", "code", "note"}
            assert each["code"] in (*all_rules(), "")


@pytest.mark.skipif(CHECKOUTS is None, reason="LOCKSTEP_LINT_CHECKOUTS names no folder of checkouts")
def test_pinned_findings_are_found() -> None:
    pins = real_code.read()
    lines = real_code.differences(Path(str(CHECKOUTS)), pins)
    assert len([line for line in lines if line.endswith("no checkout")]) < len(pins), "no repository is there"
    assert [line for line in lines if not line.endswith("no checkout")] == []


def test_collect_check_and_measure(tmp_path: Path) -> None:
    tree = tmp_path / "owner+name"
    tree.mkdir()
    (tree / "train.py").write_text(ONE_PROCESS.replace(", shuffle=True", "").replace("    model.eval()\n", ""))
    pins: list[real_code.Pin] = []
    real_code.collect(tmp_path, "owner/name", pins)
    assert [(each["code"], each["verdict"]) for each in pins[0]["findings"]] == [("LS214", None), ("LS112", None)]
    assert real_code.differences(tmp_path, pins) == []
    pins[0]["findings"][0].update(verdict="harmful", listed=1)
    pins[0]["findings"][1].update(verdict="harmless")
    pins[0]["listed"].append({"path": "train.py", "line": 1, "code": "", "note": "something else"})
    real_code.collect(tmp_path, "owner/name", pins)  # verdicts stay
    text = real_code.measure(pins)
    assert "harmful 50 %, harmless 50 %, false 0 %" in text
    assert "recall 50 %: 1 of 2 listed faults" in text
    (tree / "train.py").write_text(ONE_PROCESS.replace("    model.eval()\n", "\n    # moved\n"))
    lines = real_code.differences(tmp_path, pins)
    assert [line.split(": ")[1].split()[0] for line in lines] == ["lost", "lost", "new"]
    assert real_code.differences(tmp_path / "nowhere", pins) == ["owner/name: no checkout"]
