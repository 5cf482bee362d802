"""`lockstep audit` from the command to what it prints, on real processes."""

import json
from pathlib import Path

import pytest

from lockstep.commands.audit.command import _of_module
from tests.subprocesses import run_lockstep

SCRIPT = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        SET_EPOCH
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
RIGHT = {"BATCH": "16 // dist.get_world_size()", "SET_EPOCH": "sampler.set_epoch(epoch)"}
WRONG = {"BATCH": "4", "SET_EPOCH": "pass"}


def script(folder: Path, words: dict[str, str]) -> Path:
    text = SCRIPT
    for word, said in words.items():
        text = text.replace(word, said)
    path = folder / "train.py"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_right_script_is_clean_and_a_wrong_one_is_told_in_numbers(tmp_path: Path) -> None:
    path = script(tmp_path, RIGHT)
    ended = run_lockstep("audit", "--nproc", "1,2", str(path), cwd=tmp_path, timeout=300)
    assert ended.code == 0, ended.text
    assert "N = 2: 2 ranks, 2 training passes, 8 steps" in ended.out, ended.text
    assert ended.out.endswith("\n0 findings\n"), ended.text
    path = script(tmp_path, WRONG)
    ended = run_lockstep("audit", "--nproc", "1,2", "--format", "json", str(path), cwd=tmp_path, timeout=300)
    assert ended.code == 1, ended.text
    found = {each["code"]: each["says"] for each in json.loads(ended.out)["findings"]}
    assert found == {
        "LS101": "epoch 2 had epoch 1's order: all 32 samples of rank 0",
        "LS208": "on 2 processes 2.0 x fewer steps at the same rate: 8 samples a step instead of 4, at 0.1",
    }
    assert not ended.orphans
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train.py"]


def codes(folder: Path, *words: str) -> dict[str, str]:
    ended = run_lockstep("audit", "--format", "json", *words, cwd=folder, timeout=300)
    assert ended.code in (0, 1), ended.text
    return {each["code"]: f"{each['at']}: {each['says']}" for each in json.loads(ended.out)["findings"]}


@pytest.mark.slow
def test_a_module_in_a_package_is_run_as_python_m_runs_it(tmp_path: Path) -> None:
    """Also where it spawns its processes, which import it by its name."""
    package = tmp_path / "src" / "shapes" / "tools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    script(package, WRONG).rename(package / "training.py")
    (package / "start.py").write_text(
        "import os, torch.multiprocessing as mp, sys\n"
        "from . import training\n"
        "def work(rank, count):\n"
        "    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR='localhost')\n"
        "    training.main()\n"
        "if __name__ == '__main__':\n"
        "    assert sys.argv == [__file__, 'x', '-m', '2'] and __package__ == 'shapes.tools', sys.argv\n"
        "    mp.spawn(work, args=(2,), nprocs=2)\n"
    )
    words = "--nproc", "2", "-m", "shapes.tools.start", "x", "-m", "{nproc}"
    found = codes(tmp_path / "src", *words)
    assert found == {"LS101": "shapes/tools/training.py:18: epoch 2 had epoch 1's order: all 32 samples of rank 0"}
    (package / "__main__.py").touch()
    assert _of_module("shapes.tools", tmp_path / "src") == (package / "__main__.py", "shapes.tools.__main__")
    ended = run_lockstep("audit", "-m", "shapes.nothing", cwd=tmp_path / "src", timeout=60)
    assert ended.code == 2
    assert "there is no module shapes.nothing below" in ended.err


@pytest.mark.slow
def test_ranks_may_come_as_arguments(tmp_path: Path) -> None:
    """And three processes by default: they pad a set of 64, which 2 and 4 divide evenly."""
    path = script(tmp_path, RIGHT)
    evaluated = (
        "    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))\n"
        "    parts = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))\n"
        "    right = sum((model.module(x).argmax(1) == y).sum() for x, y in parts)\n"
        "    dist.all_reduce(right)\n"
        "    dist.destroy_process_group()\n"
    )
    joined = 'group("gloo", init_method="tcp://localhost:" + PORT, rank=int(R), world_size=int(N))'
    text = path.read_text().replace('group("gloo")', joined).replace("    dist.destroy_process_group()\n", evaluated)
    head = "import os, sys\nPORT, N, R = os.environ['MASTER_PORT'], sys.argv[1], sys.argv[2]\n"
    path.write_text(head + "del os.environ['RANK'], os.environ['WORLD_SIZE']\n" + text)
    found = codes(tmp_path, "train.py", "{nproc}", "{rank}")
    assert found.keys() == {"LS105"}, found
    assert "3 ranks evaluated 66 images of a set of 64: padding counts 2 of them twice" in found["LS105"]
