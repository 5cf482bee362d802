"""Thousands of damaged and hostile checkpoints: each is found out, none is executed, the one before it is used."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.format import EMA, MANIFEST, MODEL, OPTIMIZER, STATE, FileRecord, Manifest
from lockstep.checkpoint.restore import newest
from lockstep.checkpoint.store import folder_name
from tests.checkpoint.moments import keep
from tests.pickles import pickled

FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)
CASES = {
    "truncated": 400,
    "one bit flipped": 600,
    "bytes overwritten": 200,
    "bytes appended": 100,
    "files swapped between checkpoints": 100,
    "files swapped within": 30,
    "files missing": 30,
    "extra entries": 60,
    "links and special files": 60,
    "manifest edited": 200,
    "manifest forged to fit": 200,
    "pickle under a name of ours": 100,
    "pickle under a name of ours, manifest forged to fit": 100,
    "pickle under another name": 100,
    "hostile content, manifest forged to fit": 120,
}


@dataclass
class Case:
    """A folder with checkpoints 1, 2 and 3, of which 3 is to be spoilt."""

    folder: Path
    good: dict[int, dict[str, bytes]]  # step -> name -> content
    journal: dict[int, str]
    sentinel: Path
    rng: random.Random

    @property
    def path(self) -> Path:
        return self.folder / folder_name(3)

    def name(self) -> str:
        return self.rng.choice(FILES)

    def read(self, name: str) -> bytearray:
        return bytearray((self.path / name).read_bytes())

    def fit(self) -> None:
        """Forge a manifest that vouches for whatever lies there."""
        files = {}
        for name in (MODEL, OPTIMIZER, STATE, EMA):
            if (self.path / name).exists():
                content = (self.path / name).read_bytes()
                files[name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        (self.path / MANIFEST).write_bytes(Manifest(3, files).to_bytes())


def truncated(case: Case) -> None:
    name = case.name()
    content = case.read(name)
    (case.path / name).write_bytes(content[: case.rng.randrange(len(content))])


def one_bit_flipped(case: Case) -> None:
    name = case.name()
    content = case.read(name)
    content[case.rng.randrange(len(content))] ^= 1 << case.rng.randrange(8)
    (case.path / name).write_bytes(content)


def bytes_overwritten(case: Case) -> None:
    name = case.name()
    content = case.read(name)
    start = case.rng.randrange(len(content))
    length = case.rng.randrange(1, len(content) - start + 1)
    content[start : start + length] = case.rng.choice([bytes(length), case.rng.randbytes(length)])
    content[start] = case.good[3][name][start] ^ 0x55  # different in any case
    (case.path / name).write_bytes(content)


def bytes_appended(case: Case) -> None:
    name = case.name()
    with (case.path / name).open("ab") as file:
        file.write(case.rng.choice([b"\0", b" ", b"\n", case.rng.randbytes(9), bytes(5000)]))


def files_swapped_between_checkpoints(case: Case) -> None:
    for name in case.rng.sample(FILES, case.rng.randrange(1, 5)):
        (case.path / name).write_bytes(case.good[case.rng.choice([1, 2])][name])


def files_swapped_within(case: Case) -> None:
    one, other = case.rng.sample(FILES, 2)
    (case.path / one).write_bytes(case.good[3][other])
    (case.path / other).write_bytes(case.good[3][one])


def files_missing(case: Case) -> None:
    for name in case.rng.sample(FILES, case.rng.randrange(1, 5)):
        (case.path / name).unlink()


def extra_entries(case: Case) -> None:
    name = case.rng.choice([EMA, "model.pt", "a", ".hidden", "manifest.json~", "MODEL.SAFETENSORS", "data.pkl", "ä\n"])
    if case.rng.random() < 0.5:
        (case.path / name).mkdir()
    else:
        (case.path / name).write_bytes(case.rng.choice([b"", case.good[3][MODEL]]))


def links_and_special_files(case: Case) -> None:
    name, elsewhere = case.name(), case.folder.parent / "elsewhere"
    match case.rng.randrange(6):
        case 0:  # the right content behind a link
            (elsewhere / name).write_bytes(case.good[3][name])
            (case.path / name).unlink()
            (case.path / name).symlink_to(elsewhere / name)
        case 1:
            (case.path / name).unlink()
            (case.path / name).symlink_to(case.rng.choice(["/etc/passwd", "/dev/zero", name, "nowhere", ".."]))
        case 2:
            (case.path / name).unlink()
            os.mkfifo(case.path / name)  # who opens it waits for a writer
        case 3:
            (case.path / name).unlink()
            (case.path / name).mkdir()
        case 4:  # the folder itself
            shutil.rmtree(elsewhere / "all", ignore_errors=True)
            case.path.rename(elsewhere / "all")
            case.path.symlink_to(elsewhere / "all")
        case 5:
            shutil.rmtree(case.path)
            case.path.write_bytes(case.good[3][name])


def manifest_edited(case: Case) -> None:
    found = json.loads(case.good[3][MANIFEST])
    entry = found["files"][case.rng.choice([MODEL, OPTIMIZER, STATE])]
    match case.rng.randrange(7):
        case 0:
            found["step"] = case.rng.choice([2, 4, 3.0, "3", None, -3, 10**30])
        case 1:
            entry["bytes"] += case.rng.choice([1, -1, 8, 2**62])
        case 2:
            entry["sha256"] = hashlib.sha256(case.rng.randbytes(8)).hexdigest()
        case 3:
            found["digest"] = case.rng.choice([hashlib.sha256(case.rng.randbytes(8)).hexdigest(), None, "", 0])
        case 4:
            found["files"][case.rng.choice(["../x", "/etc/passwd", "a" * 5000, "", "model.pt"])] = entry
        case 5:
            del found[case.rng.choice(list(found))]
        case 6:
            found["format"] = case.rng.choice([0, 2, 10**9, "1", None])
    (case.path / MANIFEST).write_text(json.dumps(found, indent=1) + "\n")


def manifest_forged_to_fit(case: Case) -> None:
    """All in order in itself: only the journal knows better."""
    name = case.rng.choice([MODEL, OPTIMIZER])
    content = case.read(name)
    content[-1 - case.rng.randrange(16)] ^= 1 << case.rng.randrange(8)
    (case.path / name).write_bytes(content)
    case.fit()


def pickle_under_a_name_of_ours(case: Case) -> None:
    (case.path / case.name()).write_bytes(pickled(case.rng, case.sentinel))


def pickle_under_a_name_of_ours_manifest_forged_to_fit(case: Case) -> None:
    (case.path / case.rng.choice([MODEL, OPTIMIZER, STATE, EMA])).write_bytes(pickled(case.rng, case.sentinel))
    case.fit()


def pickle_under_another_name(case: Case) -> None:
    name = case.rng.choice(
        [
            "model.pt",
            "model.pth",
            "optimizer.bin",
            "data.pkl",
            "state.pickle",
            "__init__.py",
            "conftest.py",
            EMA,
            "x.npy",
        ]
    )
    (case.path / name).write_bytes(pickled(case.rng, case.sentinel))


_HOSTILE_STATE = [
    "", "null", "[]", "{}", "3", '"x"', "[" * 100_000, '{"a":' * 3_000 + "1" + "}" * 3_000,
    '{"state": {"$tuple": ' * 400 + "[]" + "}}" * 400,
]  # fmt: skip


def hostile_content_manifest_forged_to_fit(case: Case) -> None:
    case.journal.clear()
    if case.rng.random() < 0.4:
        name = case.rng.choice([MODEL, OPTIMIZER, EMA])
        size = case.rng.choice([2**63, 2**64 - 1, 100 << 40, 99_000_000, 10_000_000, 5000, 1, 0])
        (case.path / name).write_bytes(size.to_bytes(8, "little") + b"{" + case.rng.randbytes(64))
    elif case.rng.random() < 0.3:
        (case.path / STATE).write_text(case.rng.choice(_HOSTILE_STATE))
    else:
        found = json.loads(case.good[3][STATE])
        edits: list[Callable[[], Any]] = [
            lambda: found.update(state=[]),
            lambda: found.update(state={"$tuple": []}),
            lambda: found.update(state={"x": {"$tensor": "state.0.momentum_buffer"}}),
            lambda: found.update(state={"x": {"$pickle": "gASVAAAA"}}),
            lambda: found.update(scaler=3),
            lambda: found.update(optimizer=None),
            lambda: found.pop("optimizer"),
            lambda: found["optimizer"].update(state=[[0]]),
            lambda: found["optimizer"].update(state=[[None, {}]]),
            lambda: found["optimizer"].update(state=[[0, {"m": {"$tensor": "../../x"}}]]),
            lambda: found["optimizer"].update(rest={}),
            lambda: found["optimizer"].update(rest={"param_groups": 1}),
            lambda: found["optimizer"].update(on_host="all"),
        ]
        case.rng.choice(edits)()
        (case.path / STATE).write_text(json.dumps(found))
    case.fit()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, bytes]], dict[int, str]]:
    folder = tmp_path_factory.mktemp("good")
    digests = {step: keep(folder, step).digest for step in (1, 2, 3)}
    return {s: {name: (folder / folder_name(s) / name).read_bytes() for name in FILES} for s in digests}, digests


@pytest.mark.parametrize("kind", CASES)
def test_every_damage_is_found_out_and_the_one_before_is_used(
    kind: str, good: tuple[dict[int, dict[str, bytes]], dict[int, str]], tmp_path: Path
) -> None:
    spoil = globals()[kind.replace(",", "").replace(" ", "_")]
    folder = tmp_path / "checkpoints"
    (tmp_path / "elsewhere").mkdir()
    for number in range(CASES[kind]):
        case = Case(folder, good[0], dict(good[1]), tmp_path / "executed", random.Random(f"{kind} {number}"))
        for step in (1, 2, 3):
            if not (path := folder / folder_name(step)).exists():
                path.mkdir(parents=True)
                for name, content in good[0][step].items():
                    (path / name).write_bytes(content)
        spoil(case)
        loaded = newest(folder, case.journal if case.rng.random() < 0.5 or "forged to fit" in kind else None)
        assert loaded is not None, number
        assert (loaded.step, loaded.state["value"]) == (2, 2), number
        assert [name for name, _ in loaded.set_aside] == [folder_name(3)], number
        assert not case.sentinel.exists(), number
        aside = folder / f"damaged-{folder_name(3)}"
        aside.unlink() if aside.is_symlink() or aside.is_file() else shutil.rmtree(aside)


def test_there_are_enough_and_the_tools_work(
    good: tuple[dict[int, dict[str, bytes]], dict[int, str]], tmp_path: Path
) -> None:
    assert sum(CASES.values()) >= 2000
    case = Case(tmp_path, good[0], good[1], tmp_path / "executed", random.Random(0))
    for _ in range(20):
        content = pickled(case.rng, case.sentinel)
        if content.startswith((b"PK", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P")):  # torch's, as a zip and before that
            torch.load(io.BytesIO(content), weights_only=False)
        else:
            pickle.loads(content)
        assert case.sentinel.exists(), "these pickles do what they are meant to, where somebody reads them"
        case.sentinel.rmdir()
    keep(tmp_path, 2)
    keep(tmp_path, 3)
    case.fit()
    loaded = newest(tmp_path)
    assert loaded is not None
    assert loaded.step == 3, "what is not spoilt is taken, so the cases above fail for their damage"
