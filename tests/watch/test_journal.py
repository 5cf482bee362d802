"""The journal: whole lines at once, readable after a crash, JSON that every parser takes."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.watch.journal import Journal, Record, read

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
fields = st.dictionaries(
    st.from_regex("[a-z_]{1,8}", fullmatch=True).filter(lambda k: k not in ("kind", "time")), values
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["run", "step", "eval", "end"]), fields), max_size=5))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, Record]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path)
    for kind, record in records:
        journal.write(kind, **record)
        assert path.read_text(encoding="utf-8").endswith("\n")  # at once: who reads along sees whole lines
    journal.close()
    found = read(path)
    assert [(r.pop("kind"), r) for r in found if r.pop("time") > 1e9] == records


def test_a_line_cut_short_by_a_crash_is_left_out_and_damage_elsewhere_is_not(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("step", step=1)
    journal.write("step", step=2)
    journal.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [record["step"] for record in read(path)] == [1]
    path.write_bytes(whole[: first - 5] + b"\n" + whole[first:])
    with pytest.raises(json.JSONDecodeError):
        read(path)


def test_numbers_that_json_lacks_become_words(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write("step", loss=math.nan, inner={"a": [math.inf, -math.inf, 1.5]})
    journal.close()
    record = json.loads((tmp_path / "j").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (record["loss"], record["inner"]) == ("nan", {"a": ["inf", "-inf", 1.5]})


def test_a_second_journal_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    for step in (1, 2):
        journal = Journal(tmp_path / "j")
        journal.write("step", step=step)
        journal.close()
    assert [record["step"] for record in read(tmp_path / "j")] == [1, 2]


def test_mirrors_see_every_record_and_other_ranks_write_nothing(tmp_path: Path) -> None:
    seen: list[Record] = []
    journal = Journal(tmp_path / "j", (seen.append, seen.append))
    journal.write("eval", top1=0.5)
    journal.close()
    assert [record["top1"] for record in seen] == [0.5, 0.5]
    silent = Journal(None, (seen.append,))
    silent.write("eval", top1=0.5)
    silent.close()
    assert len(seen) == 2
