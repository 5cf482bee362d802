"""Scripts before and after: the same numbers out of both, and the pages show them as they are."""

import re
import sys
from pathlib import Path

import pytest

from tests.subprocesses import Command

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples/coming_from"
PAGES = [ROOT / "docs/coming-from.md", ROOT / "docs/zh/coming-from.md"]
LOSSES = [1.919969, 1.014650, 0.546544]  # of accelerate_after.py, on the pages
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{6})", text)]


def output(*argv: str, folder: Path) -> str:
    env = {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
    ended = Command(sys.executable, *argv, cwd=folder, env=env).end(timeout=500)
    assert ended.code == 0, ended.text
    return ended.out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_page_shows_the_scripts_after(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in ("mnist", "cifar10"):
        assert f"```python\n{(SCRIPTS / f'{name}_after.py').read_text(encoding='utf-8')}```" in text
    console = re.findall(
        r"^```console\n\$ python examples/coming_from/accelerate_after.py 2\n(.*?)```", text, re.M | re.S
    )
    assert [losses(block) for block in console] == [LOSSES]


@pytest.mark.parametrize(("name", "most"), [("mnist", 21), ("cifar10", 20)])
def test_seventy_lines_become_twenty(name: str, most: int) -> None:
    before, after = ((SCRIPTS / f"{name}_{end}.py").read_text(encoding="utf-8") for end in ("before", "after"))
    assert len(before.splitlines()) > 70
    assert len([line for line in after.splitlines() if line.strip()]) <= most
    assert [int(number) for number in re.findall(r"# (\d):", before)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_accelerate_and_lightning_print_the_losses_of_their_script_after(tmp_path: Path) -> None:
    after = losses(output(str(SCRIPTS / "accelerate_after.py"), "2", folder=tmp_path))
    assert after == pytest.approx(LOSSES, abs=1e-4)
    pytest.importorskip("accelerate")
    before = losses(output(*TORCHRUN, str(SCRIPTS / "accelerate_before.py"), folder=tmp_path))
    assert sorted(before[:3], reverse=True) == pytest.approx(after, abs=1e-4)


@pytest.mark.slow
def test_lightning_prints_the_losses_of_its_script_after(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    before = losses(output(str(SCRIPTS / "lightning_before.py"), "2", folder=tmp_path))
    assert before == pytest.approx(LOSSES, abs=1e-4)


AFTER = """
import sys
sys.path.insert(0, {scripts!r})
import mnist_after
import lockstep as ls

if __name__ == "__main__":
    ls.launch(mnist_after.main, {data!r}, 0.02, 0.0, nproc=int(sys.argv[1]))
"""


@pytest.mark.realdata
def test_the_mended_mnist_script_and_the_one_after_print_the_same(tmp_path: Path, real_data: Path) -> None:
    data = str(real_data)
    (tmp_path / "after.py").write_text(AFTER.format(scripts=str(SCRIPTS), data=data))
    flags = ("--data", data, "--fraction", "0.02")
    wrong = losses(output(*TORCHRUN, str(SCRIPTS / "mnist_before.py"), *flags, "--dropout", "0", folder=tmp_path))
    mended = losses(output(*TORCHRUN, str(SCRIPTS / "mnist_mended.py"), *flags, folder=tmp_path))
    for nproc in "1", "2":
        after = losses(output("after.py", nproc, folder=tmp_path))
        assert len(after) == 2
        assert after == pytest.approx(mended, abs=1e-3)
    assert abs(wrong[0] - mended[0]) > 0.1
