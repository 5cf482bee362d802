"""The journal: whole lines at once, readable after a crash, JSON that every parser takes."""

import json
import math
import os
import re
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.monitoring import journal as module
from lockstep.monitoring.journal import (
    CheckpointRecord,
    EvalRecord,
    Journal,
    Reader,
    Record,
    StepRecord,
    append,
    checksum,
    damage,
    end_of,
    read,
)
from lockstep.training.resume import digests

PAGE = Path(__file__).parents[2] / "docs/run-folder.md"
EVAL = EvalRecord(
    kind="eval", epoch=0, step=10, top1=0.5, top5=1.0, loss=0.75, count=360, macro_precision=0.5, macro_recall=0.5,
    macro_f1=0.5, calibration_error=0.1,
)  # fmt: skip


def step(number: int, **fields: Any) -> StepRecord:
    record = StepRecord(
        kind="step", step=number, epoch=0, samples=64 * number, lr=0.1, loss=1.0, images_per_s=9.5, data_wait_ms=0.25,
        comm_wait_ms=None,
    )  # fmt: skip
    return cast(StepRecord, {**record, **fields})


def fields_of(kind: str) -> list[set[str]]:
    """The fields of each type of record of this kind."""
    hints = [get_type_hints(record, include_extras=True) for record in get_args(Record)]
    return [set(each) - {"kind"} for each in hints if get_args(each["kind"]) == (kind,)]


def documented(page: str) -> dict[str, set[str]]:
    """Kind -> the fields that a page's table of records gives for it; what stands in brackets describes a field."""
    table = page.partition("| kind | when | fields |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return {kind.strip("`"): set(re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", cell))) for kind, _, cell in rows}


def test_the_page_lists_every_field_of_every_kind() -> None:
    table = documented(PAGE.read_text(encoding="utf-8"))
    kinds = {get_args(get_type_hints(record)["kind"])[0] for record in get_args(Record)}
    assert set(table) == kinds
    assert table == {kind: set.union(*fields_of(kind)) for kind in kinds}
    assert documented("| kind | when | fields |\n| - | - | - |\n| `a` | now | `b` (`c`), `d` |\n\n") == {
        "a": {"b", "d"}
    }


def test_what_another_process_appends_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append(path, step(1))
    with path.open("a") as file:
        file.write('{"kind": "st')  # its writer was killed here
    append(path, step(2))
    append(path, step(3))
    reader = Reader(path)
    assert [record["step"] for record in reader] == [1, 2, 3]
    assert reader.damage == damage(path) == "journal.jsonl: line 2 can't be read and was left out"


CHECKPOINTS = {10: "ab" * 32, 20: "cd" * 32}


def a_journal(path: Path) -> bytes:
    journal = Journal(path)
    journal.write(cast(Record, {"kind": "run", "resumed_from": 0}))
    for number, digest in CHECKPOINTS.items():
        journal.write(step(number))
        journal.write(
            CheckpointRecord(
                kind="checkpoint", step=number, digest=digest, checksum=checksum(number, digest), bytes=1, stall_ms=1.0,
                durable_ms=2.0,
            )
        )  # fmt: skip
    journal.close()
    content = re.sub(rb'"time": [0-9.]+', b'"time": 1.5', path.read_bytes())
    path.write_bytes(content)
    return content


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_told_or_harmless_and_never_speaks_against_a_checkpoint(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        content = bytearray(a_journal(path))
        for _ in range(data.draw(st.integers(1, 3))):
            where = data.draw(st.integers(0, len(content) - 1))
            match data.draw(st.sampled_from(["bit", "cut", "lost", "noise"])):
                case "bit":
                    content[where] ^= 1 << data.draw(st.integers(0, 7))
                case "cut":
                    del content[max(1, where) :]
                case "lost":
                    del content[where : where + 40]
                    content = content or bytearray(b"\n")
                case "noise":
                    content[where:where] = data.draw(st.binary(max_size=20))
        path.write_bytes(content)
        assert digests(Path(folder)).items() <= CHECKPOINTS.items()
        before = digests(Path(folder))
        journal = Journal(path)
        journal.write(EVAL)
        journal.close()
        assert read(path)[-1]["kind"] == "eval"  # on a line of its own
        assert digests(Path(folder)) == before


def test_torn_and_garbled_lines_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = a_journal(path).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\xff\x00garbage\n", *lines[1:], b'{"kind": "st']))
    assert damage(path) == "journal.jsonl: line 2, 7 can't be read and was left out"
    assert digests(tmp_path) == CHECKPOINTS
    path.unlink()
    assert damage(path) == ""
    os.mkfifo(path)
    for use in (read, Journal, damage):
        with pytest.raises(UserError, match="is no plain file"):
            use(path)


def test_a_full_disk_is_told_once() -> None:
    journal = Journal(None)
    journal.file, journal.path = Path("/dev/full").open("a"), Path("run/journal.jsonl")  # noqa: SIM115
    with pytest.raises(UserError, match=r"can't write run/journal\.jsonl: No space left on device"):
        journal.write(EVAL)
    journal.write(EVAL)
    journal.close()


def test_the_last_record_is_the_end_or_the_run_goes_on() -> None:
    end = cast(Record, {"kind": "end", "status": "failed"})
    assert end_of([EVAL, end]) is end
    assert end_of([end, EVAL]) is None
    assert end_of([]) is None


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
fields = st.dictionaries(
    st.from_regex("[a-z_]{1,8}", fullmatch=True).filter(lambda k: k not in ("kind", "time")), values
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["run", "step", "eval", "end"]), fields), max_size=5))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, dict[str, Any]]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path)
    for kind, record in records:
        journal.write(cast(Record, {"kind": kind, **record}))
        assert path.read_text(encoding="utf-8").endswith("\n")  # at once: who reads along sees whole lines
    journal.close()
    found = cast(list[dict[str, Any]], read(path))
    assert all(r.pop("time") > 1e9 for r in found)
    assert [(r.pop("kind"), r) for r in found] == records


def test_numbers_that_json_lacks_become_words(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write(step(1, loss=math.nan, inner={"a": [math.inf, -math.inf, 1.5]}))
    journal.close()
    record = json.loads((tmp_path / "j").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (record["loss"], record["inner"]) == ("nan", {"a": ["inf", "-inf", 1.5]})


def test_loggers_see_every_record_and_other_ranks_write_nothing(tmp_path: Path) -> None:
    seen: list[Record] = []
    journal = Journal(tmp_path / "j", (seen.append, seen.append))
    journal.write(EVAL)
    journal.close()
    assert [r["top1"] for r in seen if r["kind"] == "eval"] == [0.5, 0.5]
    silent = Journal(None, (seen.append,))
    silent.write(EVAL)
    silent.close()
    assert len(seen) == 2


@pytest.mark.parametrize(
    "line", [b'{"kind": "step", "step": 7}', b"x" * 1000, b"\xff" * 777], ids=["steps", "one", "noise"]
)
def test_reading_takes_memory_for_a_line_and_not_for_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    monkeypatch.setattr(module, "_LONGEST", 4096)
    path, count = tmp_path / "journal.jsonl", 600_000 // len(line)
    path.write_bytes((line + (b"" if line[:1] == b"x" else b"\n")) * count)  # of "one" it is a single line
    tracemalloc.start()
    found = sum(1 for _ in Reader(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == (count if line[:1] == b"{" else 0)
    assert peak < 200_000
