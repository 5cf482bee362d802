"""`lockstep audit` from the command to what it prints, on real processes."""

import json
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
def test_an_address_is_fixed_where_it_stands_in_the_script(tmp_path: Path, typed: bool) -> None:
    path, address = script(tmp_path, RIGHT), "tcp://127.0.0.1:23456"
    method = "__import__('sys').argv[1]" if typed else repr(address)
    ranks = 'rank=int(__import__("os").environ["RANK"]), world_size=int(__import__("os").environ["WORLD_SIZE"])'
    path.write_text(path.read_text().replace('group("gloo")', f'group("gloo", init_method={method}, {ranks})'))
    arguments = [address] if typed else []
    ended = run_lockstep(
        "audit", "--nproc", "1,2", "--format", "json", str(path), *arguments, cwd=tmp_path, timeout=300
    )
    assert [each["code"] for each in json.loads(ended.out)["findings"]] == ([] if typed else ["LS305"]), ended.text
