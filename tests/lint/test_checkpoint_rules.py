"""What a checkpoint lacks, who waits for it, and where a resumed run begins, in the shapes that people write."""

from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from tests.lint.checkpoint_shapes import CASES, HEAD
from tests.lint.field import LOOP
from tests.lint.shapes import BEFORE

OWN = frozenset({"LS404", "LS405", "LS406", "LS407"})


@pytest.mark.parametrize(
    ("codes", "text"), CASES, ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(CASES)]
)
def test_checkpoints_in_many_shapes(codes: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    start = 'if __name__ == "__main__":\n    import sys\n    main(sys)\n' if "def main(args)" in text else "main()\n"
    path.write_text(BEFORE + LOOP + HEAD + text + start)
    found, broken = check([path], OWN)
    assert not broken
    assert sorted({each.code for each in found}) == codes.split()
