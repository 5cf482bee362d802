"""What becomes of lint's findings when the script has run, and what the command refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.commands.audit import command
from lockstep.commands.audit.command import main
from lockstep.commands.audit.findings.every import findings
from lockstep.commands.audit.judged import _verdict, judged
from lockstep.commands.audit.output import as_json, text
from lockstep.commands.audit.records import Record
from lockstep.commands.lint import rule as lint
from lockstep.errors import UserError
from tests.audit.made import event, record
from tests.audit.test_audit import SCRIPT, WRONG
from tests.audit.test_findings import one_order


def ran(world: int, wrong: bool) -> Record:
    right = record(world)
    if not wrong:
        return right
    return replace(right, ranks={rank: one_order(world, rank, events) for rank, events in right.ranks.items()})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script in which lint finds no set_epoch."""
    path, words = tmp_path / "train.py", SCRIPT
    for word, said in WRONG.items():
        words = words.replace(word, said)
    path.write_text(words)
    return path


def test_lint_is_confirmed_withdrawn_or_left_by_what_happened(script: Path) -> None:
    def verdict(records: list[Record]) -> str:
        static = judged(script, findings(records), records)
        return next(each.verdict for each in static if each.finding.code == "LS101")

    nothing = Record(2, {0: [event("process", rank=0, world=2, parent=1, worker=None)], 1: []})
    assert verdict([ran(1, True), ran(2, True)]) == "confirmed"
    assert verdict([ran(1, False), ran(2, False)]) == "withdrawn"
    assert verdict([ran(1, False)]) == "not observed"
    assert verdict([nothing]) == "not observed"
    assert verdict([replace(ran(2, False), ended="stalled")]) == "not observed"


def test_text_and_json_tell_the_same(script: Path) -> None:
    records = [ran(1, True), ran(2, True)]
    found = findings(records)
    static = judged(script, found, records)
    told = text(script, records, found, static)
    plain = json.loads(as_json(script, records, found, static))
    assert [each["code"] for each in plain["findings"]] == ["LS101"]
    assert "train.py:20: LS101: set_epoch is never called\n    seen:   epoch 2 had epoch 1's order" in told
    assert {(each["code"], each["verdict"]) for each in plain["lint"]} >= {("LS101", "confirmed")}
    assert "LS101 by lint, confirmed" in told
    assert told.endswith("\n1 finding")
    assert [each["nproc"] for each in plain["runs"]] == [1, 2]


def test_exit_codes(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def code(*records: Record) -> int:
        monkeypatch.setattr(command, "run", lambda *_: (list(records), []))
        return command.main([str(script)])

    clean = script.with_name("clean.py")
    clean.write_text("import torch\n")
    assert code(ran(1, True), ran(2, True)) == 1
    script = clean
    assert code(ran(1, False), ran(2, False)) == 0
    assert code(replace(ran(1, False), ended="failed", codes=(1,), printed=("its last words",))) == 2
    assert "failed on 1 process:\nits last words" in capsys.readouterr().err
    assert code(Record(2, {0: [event("process", rank=0, world=2, parent=1, worker=None)]})) == 2
    assert "took no step of an optimizer" in capsys.readouterr().err


def test_what_can_not_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes a script"):
        main(["--nproc", "2"])
    with pytest.raises(UserError, match="is not there"):
        main(["--nproc", "2", str(tmp_path / "none.py"), "--nproc", "words"])
    with pytest.raises(UserError, match="from 1"):
        main(["--nproc", "0", "train.py"])
    with pytest.raises(UserError, match="format"):
        main(["--format", "xml", "train.py"])


def test_another_finding_may_show_what_lint_says() -> None:
    """LS104 shows that a number is one rank's; that the best model is chosen by it, lint has read."""
    static = lint.Finding(Path("best.py"), 3, 0, "LS205", "", 3, 1)
    right = [record(1), record(2)]
    alone = [
        Record(2, {rank: [e for e in events if e["event"] != "collective"] for rank, events in right[1].ranks.items()})
    ]
    assert _verdict(static, findings(alone), alone, ()) == "confirmed"
    assert _verdict(static, findings(right), right, ()) == "withdrawn"
    resumed = replace(static, code="LS404")
    assert _verdict(resumed, [], right, ()) == "not observed"
    assert _verdict(resumed, [], right, [Record(1, {}, way="resumed")]) == "withdrawn"
