"""Files written by other names than torch.save, states that libraries write, and what is unpickled."""

from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from tests.lint.checkpoint_shapes import HEAD
from tests.lint.field import LOOP
from tests.lint.shapes import BEFORE
from tests.lint.stored import RESUMED, UNPICKLED, WRITTEN

OWN = frozenset({"LS401", "LS402", "LS403", "LS404", "LS405", "LS406", "LS407"})
SEVERAL = """\
def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    path = os.environ["WEIGHTS"]
    net, opt, loader = parts()
    model = DDP(net)
BODY
    dist.destroy_process_group()
main()
"""
ALONE = """\
def main(args):
    model, opt, loader = parts()
BODY
main(None)
"""


def _codes(text: str, body: str, above: str, folder: Path) -> list[str]:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path = folder / "train.py"
    path.write_text(BEFORE + LOOP + HEAD + above + text.replace("BODY", lines))
    found, broken = check([path], OWN)
    assert not broken
    return sorted({each.code for each in found})


@pytest.mark.parametrize(("codes", "body", "above"), WRITTEN)
def test_what_several_processes_write_and_read(codes: str, body: str, above: str, tmp_path: Path) -> None:
    assert _codes(SEVERAL, body, above, tmp_path) == codes.split()


@pytest.mark.parametrize(("codes", "body", "above"), [*UNPICKLED, *RESUMED])
def test_what_a_run_reads_to_go_on(codes: str, body: str, above: str, tmp_path: Path) -> None:
    assert (
        _codes(ALONE.replace("    fit(loader", "    # fit(loader") if "fit(" in body else ALONE, body, above, tmp_path)
        == codes.split()
    )
