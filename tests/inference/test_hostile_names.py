"""Names out of files (classes of weights, pictures on disk) in what predict and eval write: harmless, and read back."""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import unicodedata
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import Card
from lockstep.cli import main
from lockstep.commands.predict import class_folders
from lockstep.errors import UserError, cell
from tests.inference.runs import leave_a_run

HOSTILE = (
    *("../../escaped", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "nul\0byte", "line\nbreak", "\x1b[31mred\x1b[0m"),
    *("CON", "con", "nul.txt", "COM1", "aux./../../x", "prn. \n/etc", "~root", "-rf", "$(reboot)", "`id`", "%2e%2e"),
    *("%", "C:\\x", "a:b", ".hidden"),
    *("=cmd|' /C calc'!A0", "+1", "-1+2", "@sum(A1)", "\t=1+1", "\r=1", " =1", "'=1", "<b>x</b>", "a,b;c\td", '"'),
    *("Cat", "cat", "CAT", "Caf\u00e9", "Cafe\u0301", "\u202egpj.exe", "\ud800", "raw\udcff", "\u732b", "x" * 255),
    *(" space ", "end.", "\u200d", "\x9b31m", "_", "Stra\u00dfe", "STRASSE", "\ufb01x", "fix"),
)
FORMULA = re.compile(r"\s*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
names = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(), max_size=20),
    st.text("aA./\\%-=~ \0\n\u0301\u00e9", max_size=6),
    st.builds("".join, st.lists(st.sampled_from(["con", "nul", "COM1", ".", "/", "..", " ", "\n", "a"]), max_size=5)),
)


def obeyed(text: str) -> set[str]:
    """What a terminal or an editor obeys: control characters, marks of direction, halves of characters."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\u200c\u200d"}


def folded(name: str) -> str:
    """What a file system that ignores case and Unicode form goes by."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


@example([name for name in HOSTILE if len(name) < 255])  # all that differ in case or form alone among them
@given(st.lists(names, min_size=1, max_size=12))
@settings(max_examples=150)
def test_a_class_s_folder_is_one_harmless_name_and_says_the_class(classes: list[str]) -> None:
    if any(len(name.encode("utf-8", "surrogatepass")) * 3 > 255 for name in classes):
        with suppress(UserError):
            class_folders(classes)
        return
    found = class_folders(classes)
    assert set(found) == set(classes)
    for name, folder in found.items():
        assert folder.isprintable()
        assert not set(folder) & set('/\\:*?"<>|')
        assert folder[0] not in " .-~"
        assert folder[-1] not in " ."
        assert not re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", folder)
        assert 0 < len(folder.encode()) <= 255
        assert name == ("" if folder == "%" else unquote(folder, errors="surrogatepass"))
    assert len({folded(folder) for folder in found.values()}) == len(found)


def test_harmless_classes_keep_their_names() -> None:
    classes = ["cat", "golden retriever", "\u732b", "Caf\u00e9", "r2-d2", "a.b", "(x) & 'y'", "cat"]
    assert class_folders(classes) == {name: name for name in classes}


@given(names)
def test_a_cell_is_no_formula_and_says_a_printable_text(text: str) -> None:
    found = cell(text)
    assert not FORMULA.match(found)
    assert not obeyed(found)
    found.encode()
    if text.isprintable():
        assert found.removeprefix("'") == text if found != text else True
        assert (found == text) == (not FORMULA.match(text) and not text.lstrip().startswith("'"))


def tree(folder: Path) -> dict[str, str]:
    """Digests of all files below a folder, by path."""
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def forged(run: Path, path: Path, classes: tuple[str, ...]) -> Path:
    """The run's weights with other names of classes, sealed as anybody can seal them."""
    source = run / "weights" / "best.safetensors"
    card = replace(Card.read(source), classes=classes)
    weights.write_sealed(load_file(source), path, card.to_metadata())
    return path


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments), "--nproc", "1", "--device", "cpu", "--workers", "0"])
    return int(end.value.code or 0), *capsys.readouterr()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_a_run(tmp_path_factory.mktemp("run"))


def test_a_strangers_weights_write_nothing_outside_and_show_nothing_that_a_terminal_obeys(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures, inside = run / "data" / "val", tmp_path / "deep" / "deeper" / "sorted"
    hostile = cycle([name for name in HOSTILE if len(name) < 255])
    before, of_pictures = tree(run), tree(pictures)
    for number in range(len(HOSTILE) // 4 + 1):
        classes = tuple(next(hostile) for _ in range(4))
        path, target = forged(run, tmp_path / "stranger.safetensors", classes), inside / str(number)
        answers = tmp_path / "answers.jsonl"
        outside = tree(tmp_path)
        common = ("predict", path, pictures, "--top", 4)
        code, out, err = command(capsys, *common, "--sort-into", target, "--format", "jsonl", "--file", answers)
        assert (code, out) == (0, ""), err
        assert obeyed(err) <= {"\n"}
        found = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        assert set(found[0]["classes"]) == set(classes)
        now = tree(tmp_path)
        copies = {p: digest for p, digest in now.items() if Path(p).is_relative_to(target)}
        assert {p: d for p, d in now.items() if p not in copies and p != str(answers)} == outside
        assert sorted(copies.values()) == sorted(of_pictures.values())
        for copy, digest in copies.items():  # below the folder that says the class which the answers say
            (folder, _) = Path(copy).relative_to(target).parts
            asked = {answer["classes"][0] for answer in found if of_pictures[answer["path"]] == digest}
            assert asked == {"" if folder == "%" else unquote(folder, errors="surrogatepass")}
        answers.unlink()
        code, out, _ = command(capsys, *common, "--format", "csv")
        for row in csv.reader(io.StringIO(out)):
            assert not any(FORMULA.match(text) for text in row)
        assert obeyed(out) <= {"\n", "\r"}
        code, out, _ = command(capsys, *common)
        assert obeyed(out) <= {"\n", "\r"}
        code, out, _ = command(capsys, *common, "--format", "jsonl")
        assert obeyed(out) <= {"\n", "\r"}
        assert [json.loads(line) for line in out.splitlines()] == found
    assert tree(run) == before


def test_a_class_whose_name_no_folder_can_have_is_refused_before_anything_is_done(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forged(run, tmp_path / "stranger.safetensors", ("a", "b", "c", "/" * 86))
    code, out, err = command(
        capsys, "predict", path, run / "data" / "val", "--sort-into", tmp_path / "sorted", "--file", tmp_path / "x"
    )
    assert (code, out) == (2, "")
    assert "258 bytes as a folder's name" in err
    assert not (tmp_path / "sorted").exists()
    assert not (tmp_path / "x").exists()


def test_pictures_and_classes_that_are_not_utf8_are_written_in_all_formats(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = next((run / "data" / "val").rglob("*.png"))
    folder = tmp_path / os.fsdecode(b"photos-\xff")
    folder.mkdir()
    for name in (b"\xfe.png", b"\x1b[2J.png", "\u732b.png".encode(), b"=1.png"):
        (folder / os.fsdecode(name)).write_bytes(source.read_bytes())
    for form in ("table", "csv", "jsonl"):
        for file in ("", tmp_path / f"answers.{form}"):
            where = ("--file", file) if file else ()
            code, out, err = command(capsys, "predict", run, folder, "--format", form, *where)
            assert code == 0, err
            text = file.read_text(encoding="utf-8") if isinstance(file, Path) else out
            assert obeyed(text) <= {"\n", "\r"}
            assert len(text.splitlines()) == 4 + (form == "csv")
            if form == "jsonl":
                assert {json.loads(line)["path"] for line in text.splitlines()} == set(map(str, folder.iterdir()))
            else:
                assert "\\xfe.png" in text
                assert "\u732b.png" in text


def test_scores_of_classes_with_any_names_are_written_in_all_formats(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = ("=1+1", "\x1b[31m", "raw\udcff", "$\\frac$")
    path, pictures = forged(run, tmp_path / "stranger.safetensors", classes), tmp_path / os.fsdecode(b"p-\xff\x1b[2J")
    for name, folder in zip(classes, sorted((run / "data" / "val").iterdir()), strict=True):
        shutil.copytree(folder, pictures / name)
    for ending in ("csv", "json"):
        report = tmp_path / f"scores.{ending}"
        code, out, err = command(capsys, "eval", path, "--data", pictures, "--report", report)
        assert code == 0, err
        assert obeyed(out + err) <= {"\n"}
        if ending == "csv":
            rows = list(csv.reader(io.StringIO(report.read_text(encoding="utf-8"))))
            assert [row[0] for row in rows] == ["class", "'=1+1", "\\x1b[31m", "raw\\xff", "$\\frac$"]
        else:
            assert tuple(json.loads(report.read_text(encoding="utf-8"))["classes"]) == classes
