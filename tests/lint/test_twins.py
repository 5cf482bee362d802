"""Programs that differ by a line or two: the wrong one has a fault, the right one none.

A line that ends with `# wrong` stands in the wrong one alone, one with `# right` in the right one.
"""

import re
from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from lockstep.commands.lint.rule import RULES
from tests.lint.handed import ALONE, HANDED
from tests.lint.innocent import INNOCENT
from tests.lint.maths import MATHS
from tests.lint.modes import MODES
from tests.lint.numbers import NUMBERS
from tests.lint.reads import READS, UNALIKE
from tests.lint.shapes import BEFORE
from tests.lint.stepping import STRANGE

RIGHT = INNOCENT + ALONE + UNALIKE
START = """\
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    torch.manual_seed(rank)
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    held = make(101); test_loader = DataLoader(Subset(held, range(rank, 101, world)), batch_size=16)
    model = DDP(Deep()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
"""
STOP = """\
    dist.destroy_process_group()
main()
"""
DEEP = """\
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 10); self.drop = nn.Dropout(0.5); self.fc = nn.Linear(10, 2)
    def forward(self, x):
        return self.fc(self.drop(self.a(x)))
"""


def twin(text: str, other: str, folder: Path) -> list[str]:
    """The codes found in a program without the lines of its other twin; `--- name` begins another file of it."""
    text = text.replace("START\n", START).replace("STOP\n", STOP)
    kept = "".join(line for line in text.splitlines(keepends=True) if not line.rstrip().endswith(f"# {other}"))
    whole, *files = re.split(r"^--- (\w+)\n", kept, flags=re.MULTILINE)
    for name, part in [("train", BEFORE + DEEP + whole), *zip(files[::2], files[1::2], strict=True)]:
        (folder / f"{name}.py").write_text(part)
    found, broken = check([folder / "train.py", *(folder / f"{name}.py" for name in files[::2])], frozenset(RULES))
    assert not broken
    return sorted({each.code for each in found})


@pytest.mark.parametrize(
    ("codes", "name", "text"),
    NUMBERS + MODES + MATHS + HANDED + STRANGE + READS,
    ids=lambda value: value if len(value) < 40 else "",
)
def test_twins(codes: str, name: str, text: str, tmp_path: Path) -> None:
    assert name
    assert twin(text, "right", tmp_path) == codes.split(), text
    assert twin(text, "wrong", tmp_path) == [], text


@pytest.mark.parametrize(
    ("name", "text"), INNOCENT + ALONE + UNALIKE, ids=[name for name, _ in INNOCENT + ALONE + UNALIKE]
)
def test_innocent_programs(name: str, text: str, tmp_path: Path) -> None:
    assert twin(text, "wrong", tmp_path) == [], name
