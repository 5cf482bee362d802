"""Collectives, and functions that run one, where a part of the ranks alone comes by; and the same on all ranks."""

from pathlib import Path

import pytest

from tests.lint.shapes import BEFORE
from tests.lint.test_rules import codes_in

BEGIN = """\
import functools
def one_alone(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        if dist.get_rank() == 0:
            return function(*args, **kwargs)
        return None
    return inner
def told(function):
    def inner(*args, **kwargs):
        found = function(*args, **kwargs)
        if dist.get_rank() == 0:
            print(function.__name__, found)
        return found
    return inner
def is_boss():
    return not dist.is_initialized() or dist.get_rank() == 0
def total(value):
    out = value.clone()
    dist.all_reduce(out)
    return out
DECORATOR
def judge(model, loader):
    model.eval()
    good = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            good[0] += (model(x).argmax(1) == y).sum()
            good[1] += len(y)
    good = total(good)
    return (good[0] / good[1]).item()
class Base:
    def __init__(self, rank):
        self.chief = rank == 0
    def end(self, model, loader):
        CHIEF
            self.measure(model, loader)
    def measure(self, model, loader):
        raise NotImplementedError
class Mine(Base):
    def measure(self, model, loader):
        self.last = judge(model, loader)
def log(model, loader, rank):
    LOG
def part(value, group):
    dist.all_reduce(value, group=group)
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = Net()
    loader = DataLoader(Subset(make(64), range(rank, 64, world)), batch_size=8)
    value = torch.ones(1)
    for epoch in range(3):
        BODY
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
WRONG = [
    "if rank == 0:\n    print(judge(net, loader))",
    "if rank == 0:\n    if epoch % 2 == 0:\n        print(judge(net, loader))",
    "if epoch % 2 == 0 and rank == 0:\n    print(judge(net, loader))",
    "if torch.distributed.get_rank() == 0:\n    print(judge(net, loader))",
    "if world > 1 and rank == 0:\n    dist.barrier()",
    "if is_boss():\n    print(judge(net, loader))",
    "if rank != 0:\n    continue\nprint(judge(net, loader))",
    "best = judge(net, loader) if not rank else 0.0",
    "rank == 0 and dist.barrier()",
    "quiet = one_alone(judge)\nquiet(net, loader)",
    "if rank == 0:\n    group = dist.new_group([0])",
    "if rank == 0:\n    other = DDP(Net())",
]
RIGHT = [
    "best = judge(net, loader)\nif rank == 0:\n    print(best)",
    "if rank == 0:\n    print(judge(net, loader))\nelse:\n    judge(net, loader)",
    "if rank != 0:\n    dist.barrier()\nprint(epoch)\nif rank == 0:\n    dist.barrier()",
    "if world == 1 and rank == 0:\n    print(judge(net, loader))",
    "if dist.is_initialized():\n    dist.barrier()",
    "if rank in (0, 1):\n    part(value, net)",
    "if rank < world:\n    dist.barrier()",
]


def _script(body: str = "pass", decorator: str = "", chief: str = "if True:", log: str = "pass") -> str:
    text = BEGIN.replace("BODY", body.replace("\n", "\n        ")).replace("DECORATOR\n", decorator)
    return BEFORE + text.replace("CHIEF", chief).replace("LOG", log)


@pytest.mark.parametrize("body", WRONG)
def test_some_ranks_alone_come_to_a_collective(body: str, tmp_path: Path) -> None:
    assert codes_in(_script(body), tmp_path) == ["LS308"]


@pytest.mark.parametrize("body", RIGHT)
def test_all_ranks_come_to_a_collective(body: str, tmp_path: Path) -> None:
    assert codes_in(_script(body), tmp_path) == []


def test_through_decorators_classes_and_early_returns(tmp_path: Path) -> None:
    assert codes_in(_script("judge(net, loader)", "@one_alone\n"), tmp_path) == ["LS308"]
    assert codes_in(_script("judge(net, loader)", "@told\n"), tmp_path) == []
    assert codes_in(_script("Mine(rank).end(net, loader)", chief="if self.chief:"), tmp_path) == ["LS308"]
    assert codes_in(_script("Mine(rank).end(net, loader)"), tmp_path) == []
    late = "if rank != 0:\n        return\n    print(judge(model, loader))"
    assert codes_in(_script("log(net, loader, rank)", log=late), tmp_path) == ["LS308"]
    early = "best = judge(model, loader)\n    if rank != 0:\n        return\n    print(best)"
    assert codes_in(_script("log(net, loader, rank)", log=early), tmp_path) == []
