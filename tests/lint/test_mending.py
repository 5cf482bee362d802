"""What --fix writes for set_epoch, shuffle beside a sampler and the group's end: clean, once, and nothing else."""

import re
from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from lockstep.commands.lint.fixes import fix
from lockstep.commands.lint.rule import RULES
from tests.lint.shapes import BEFORE

EVERY = frozenset(RULES)
ROOT = Path(__file__).parents[2]
SCRIPT = """\
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = make(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)  # é
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
TOLD = "        sampler.set_epoch(epoch)\n"
END = "    dist.destroy_process_group()\n"
LAST = "            opt.step()\n"
LOADER = "DataLoader(data, batch_size=8, sampler=sampler)"
MENDED = [  # code, what stands in the wrong script in place of what, in the right one
    ("LS101", "", TOLD),
    ("LS306", "", END),
    ("LS306", f"{LAST}    # the last line\n", f"{LAST}{END}    # the last line\n"),
    ("LS306", f"{LAST[:-1]}  # why\n", f"{LAST[:-1]}  # why\n{END}"),
    ("LS103", "DataLoader(data, batch_size=8, sampler=sampler, shuffle=True)", LOADER),
    ("LS103", "DataLoader(data, batch_size=8, shuffle=True, sampler=sampler)", LOADER),
    ("LS103", "DataLoader(data, shuffle=True, batch_size=8,\n        sampler=sampler,\n    )", ""),
    ("LS103", "DataLoader(\n        data,\n        8,\n        shuffle=True,\n        sampler=sampler,\n    )", ""),
    ("LS103", "DataLoader(data, 8, sampler=sampler,  # one\n        shuffle=True, num_workers=0,\n    )", ""),
]
LEFT = [  # what is found and left to whoever wrote it: code, old, new
    ("LS101", TOLD, "", "for epoch in range(3)", "for _ in range(3)"),
    ("LS101", TOLD, "", "    sampler = D", "    own = {}\n    own['s'] = sampler = D"),
    ("LS101", TOLD, "", "for epoch in range(3):\n", "for epoch in range(3):\n        sampler = sampler\n"),
    ("LS306", END, "", "    data = make", "    if os.environ.get('DRY'): return\n    data = make"),
    ("LS306", END, "", "    dist.init", "    if True: dist.init"),
    ("LS306", END, "    os._exit(0)\n", "", ""),
    ("LS103", "sampler=sampler)", "sampler=sampler,  # drawn\n        shuffle=True)", "", ""),
    ("LS103", "sampler=sampler)", "sampler=sampler, **{'shuffle': True})", "", ""),
    ("LS103", "sampler=sampler)", "sampler=sampler, shuffle=True)", "Sampler(data)", "Sampler(data, shuffle=False)"),
]


def _codes(path: Path) -> set[str]:
    found, broken = check([path], EVERY)
    assert not broken
    return {each.code for each in found}


def _wrong(wrong: str, right: str) -> tuple[str, str]:
    """The script with a fault, and as --fix has to leave it."""
    if not right:  # a loader whose own words stay
        text = SCRIPT.replace(LOADER, wrong)
        dropped = wrong.replace(" shuffle=True,", "", 1) if " shuffle=True, " in wrong else wrong
        dropped = dropped.replace("\n        shuffle=True,", "", 1)
        return text, SCRIPT.replace(LOADER, dropped)
    if wrong.startswith(LAST[:-1]):
        return SCRIPT.replace(END, "").replace(LAST, wrong), SCRIPT.replace(END, "").replace(LAST, right)
    return SCRIPT.replace(right, wrong), SCRIPT


@pytest.mark.parametrize(("code", "wrong", "right"), MENDED)
@pytest.mark.parametrize("crossed", [False, True], ids=["", "windows"])
def test_a_mended_file_is_clean_and_else_the_same(
    code: str, wrong: str, right: str, crossed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    before, after = ((BEFORE + text).encode() for text in _wrong(wrong, right))
    end = b"\r\n" if crossed else b"\n"
    path.write_bytes(before.replace(b"\n", end))
    assert _codes(path) == {code}
    assert fix(check([path], EVERY)[0]) == []
    assert path.read_bytes() == after.replace(b"\n", end)
    assert fix(check([path], EVERY)[0]) == []
    assert path.read_bytes() == after.replace(b"\n", end), "a second run changes nothing"


@pytest.mark.parametrize(("code", "old", "new", "more", "other"), LEFT)
def test_what_needs_a_decision_is_left(code: str, old: str, new: str, more: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    assert old in SCRIPT
    assert more in SCRIPT
    text = BEFORE + SCRIPT.replace(old, new).replace(more or old, other)
    path.write_text(text)
    found = [each for each in check([path], EVERY)[0] if each.code == code]
    assert found
    assert not [each for each in found if each.edits]
    fix(found)
    assert path.read_text() == text


def test_the_pages_say_which_codes_are_mended() -> None:
    shown = {code for code in EVERY if "--fix" in (ROOT / f"docs/lint/{code}.md").read_text(encoding="utf-8")}
    for page, head in (("docs/lint.md", "What `--fix` mends"), ("docs/zh/lint.md", "`--fix` 会改什么")):
        told = (ROOT / page).read_text(encoding="utf-8").partition(f"## {head}")[2].partition("## ")[0]
        assert set(re.findall(r"LS\d{3}", told)) == shown
