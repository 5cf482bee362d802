"""Hundreds of damaged and hostile checkpoints: each is found out, none is executed, the one before it is used."""

import io
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.format import EMA, MANIFEST, MODEL, OPTIMIZER, STATE
from lockstep.checkpoint.restore import newest
from lockstep.checkpoint.store import folder_name
from tests import damage_kinds
from tests.checkpoint.moments import keep
from tests.damage_kinds import Case, sign
from tests.pickles import pickled

FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)
Good = tuple[dict[int, dict[str, bytes]], dict[int, str]]  # step -> name -> content; step -> digest


def of_another_one(case: Case) -> bool:
    for name in case.rng.sample(FILES, case.rng.randrange(1, 5)):
        other = case.folder.parent / folder_name(case.rng.choice([1, 2])) / name
        (case.folder / name).write_bytes(other.read_bytes())
    return False


def forged_to_fit(case: Case) -> bool:
    """All in order in itself: only the journal knows better."""
    path = case.pick(MODEL, OPTIMIZER)
    content = bytearray(path.read_bytes())
    content[-1 - case.rng.randrange(16)] ^= 1 << case.rng.randrange(8)
    path.write_bytes(content)
    sign(case.folder)
    return True


def the_folder_itself(case: Case) -> bool:
    moved = case.elsewhere / "all"
    shutil.rmtree(moved, ignore_errors=True)
    case.folder.rename(moved)
    if case.rng.random() < 0.5:
        case.folder.symlink_to(moved)
    else:
        case.folder.write_bytes((moved / MODEL).read_bytes())
    return False


_HOSTILE_STATE = [
    "", "null", "[]", "{}", "3", '"x"', "[" * 100_000, '{"a":' * 3_000 + "1" + "}" * 3_000,
    '{"state": {"$tuple": ' * 400 + "[]" + "}}" * 400,
]  # fmt: skip


def hostile(case: Case) -> bool:
    """What no loader can use, signed; the journal is not asked."""
    if case.rng.random() < 0.4:
        name = case.rng.choice([MODEL, OPTIMIZER, EMA])
        size = case.rng.choice([2**63, 2**64 - 1, 100 << 40, 99_000_000, 10_000_000, 5000, 1, 0])
        (case.folder / name).write_bytes(size.to_bytes(8, "little") + b"{" + case.rng.randbytes(64))
    elif case.rng.random() < 0.3:
        (case.folder / STATE).write_text(case.rng.choice(_HOSTILE_STATE))
    else:
        found = json.loads((case.folder / STATE).read_bytes())
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
        (case.folder / STATE).write_text(json.dumps(found))
    sign(case.folder)
    return True


TIMES: dict[Callable[[Case], bool], int] = {
    **dict.fromkeys((damage_kinds.bits, damage_kinds.cut, damage_kinds.fields), 80),
    **dict.fromkeys((damage_kinds.overwritten, damage_kinds.added, damage_kinds.pickles, forged_to_fit), 40),
    **dict.fromkeys((damage_kinds.appended, damage_kinds.special, damage_kinds.tensors, of_another_one, hostile), 20),
    **dict.fromkeys((damage_kinds.swapped, damage_kinds.removed, the_folder_itself), 6),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    digests = {step: keep(folder, step).digest for step in (1, 2, 3)}
    return {s: {name: (folder / folder_name(s) / name).read_bytes() for name in FILES} for s in digests}, digests


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Its files, where it is a folder of plain files alone."""
    plain = not checkpoint.is_symlink() and checkpoint.is_dir()
    paths = [*checkpoint.iterdir()] if plain else []
    plain &= all(path.is_file() and not path.is_symlink() for path in paths)
    return {path.name: path.read_bytes() for path in paths} if plain else {}


@pytest.mark.parametrize("kind", TIMES, ids=lambda kind: kind.__name__)
def test_every_damage_is_found_out_and_the_one_before_is_used(
    kind: Callable[[Case], bool], good: Good, tmp_path: Path
) -> None:
    folder, path = tmp_path / "checkpoints", tmp_path / "checkpoints" / folder_name(3)
    (tmp_path / "elsewhere").mkdir()
    spoilt = 0
    for number in range(TIMES[kind]):
        case = Case(path, random.Random(f"{kind.__name__} {number}"), tmp_path / "executed", tmp_path / "elsewhere")
        for step in (1, 2, 3):
            if not (whole := folder / folder_name(step)).exists():
                whole.mkdir(parents=True)
                for name, content in good[0][step].items():
                    (whole / name).write_bytes(content)
        signed = kind(case)
        known = kind is not hostile and (signed or case.rng.random() < 0.5)
        as_it_was = contents(path) == good[0][3]
        loaded = newest(folder, good[1] if known else None)
        assert not case.sentinel.exists(), number
        assert loaded is not None, number
        newer = 2 + as_it_was
        assert (loaded.step, loaded.state["value"]) == (newer, newer), number
        if not as_it_was:
            spoilt += 1
            assert [name for name, _ in loaded.set_aside] == [folder_name(3)], number
            aside = folder / f"damaged-{folder_name(3)}"
            aside.unlink() if aside.is_symlink() or aside.is_file() else shutil.rmtree(aside)
    assert spoilt > 0.5 * TIMES[kind]


def test_there_are_enough_and_the_tools_work(good: Good, tmp_path: Path) -> None:
    assert sum(TIMES.values()) >= 400
    draw, sentinel = random.Random(0), tmp_path / "executed"
    for _ in range(20):
        content = pickled(draw, sentinel)
        if content.startswith((b"PK", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P")):  # torch's, as a zip and before that
            torch.load(io.BytesIO(content), weights_only=False)
        else:
            pickle.loads(content)
        assert sentinel.exists(), "these pickles do what they are meant to, where somebody reads them"
        sentinel.rmdir()
    keep(tmp_path, 2)
    sign(keep(tmp_path, 3).path)
    loaded = newest(tmp_path)
    assert loaded is not None
    assert loaded.step == 3, "what is not spoilt is taken, so the cases above fail for their damage"
