"""What a user's factories make of the number of processes, or each time anew, is said on any number of processes."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import Config, ModelConfig, OptimConfig
from lockstep.data.image_sets import ArraySet
from lockstep.distributed.world import World, pretended_process, pretended_rank
from lockstep.training.assemble import _share_state, assemble, made_otherwise
from tests.hostile.runs import neutral
from tests.ranks import run_ranks
from tests.subprocesses import run_lockstep

HERE = __name__
ALONE = World.single()


def images() -> ArraySet:
    pixels = np.zeros((4, 1, 8, 8), np.uint8)
    return ArraySet("blank", ("a", "b"), (0.5,), (0.2,), (pixels,), np.arange(4) % 2, "blank")


class Net(nn.Module):
    """Keeps what is another one in each process, and in no weight."""

    begun: Tensor

    def __init__(self, scale: float = 1.0, seed: int | None = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 2)
        self.process, self.ranks = os.getpid(), dist.is_initialized()
        self.register_buffer("begun", torch.from_numpy(np.random.default_rng(seed).normal(size=3) * scale))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x.flatten(1))
        return y


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plain() -> nn.Module:
    return Net()


def scaled_for_several() -> nn.Module:
    return Net(0.5 if "RANK" in os.environ else 1.0)


def unseeded() -> nn.Module:
    return Net(seed=None)


class Ordered(Net):
    """An order of features that is no buffer, by an address that all processes of a run share."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.random.default_rng(id(Net)).permutation(64).tolist()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)[:, self.order])


class Halved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2 // processes()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Main(Halved):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2 - int(os.environ.get("RANK", "0"))


def by_rank() -> nn.Module:
    return Net(seed=dist.get_rank() if dist.is_initialized() else 0)


def sgd(model: nn.Module, optim: Any, lr: float) -> Any:
    return torch.optim.SGD(model.parameters(), lr)


def rate(model: nn.Module, optim: Any, lr: float) -> Any:
    return torch.optim.SGD(model.parameters(), lr * processes())


def rate_of_rank(model: nn.Module, optim: Any, lr: float) -> Any:
    return torch.optim.SGD(model.parameters(), lr * (1 + int(os.environ.get("RANK", "0"))))


def betas(model: nn.Module, optim: Any, lr: float) -> Any:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    groups = [{"params": model.fc.weight}, {"params": model.fc.bias, "betas": (0.9, 1 - 1e-3 * ranks)}]
    return torch.optim.Adam(groups, lr)


def unseeded_noise(model: nn.Module, optim: Any, lr: float) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    optimizer.noise = np.random.default_rng()  # type: ignore[attr-defined]
    return optimizer


def noise_of_rank(model: nn.Module, optim: Any, lr: float) -> Any:
    optimizer = sgd(model, optim, lr)
    optimizer.noise = np.random.default_rng(dist.get_rank())
    return optimizer


CASES = {
    ("plain", "sgd"): "",
    ("by_rank", "adam"): "",
    ("mlp", "sgd"): "",
    ("scaled_for_several", "sgd"): "with the number of processes: begun of ",
    ("unseeded", "sgd"): "with every run: begun of ",
    ("Ordered", "sgd"): f"with every run: the output of {HERE}:Ordered (by process or order)",
    ("Halved", "sgd"): f"with the number of processes: the output of {HERE}:Halved (by ",
    ("Main", "sgd"): f"with the number of processes: the output of {HERE}:Main (by factor) is made by each",
    ("mlp", "rate_of_rank"): "with the number of processes: lr of parameter group 0 of ",
    ("mlp", "rate"): "with the number of processes: lr of parameter group 0 of ",
    ("plain", "unseeded_noise"): "with every run: noise of ",
    ("plain", "betas"): "with the number of processes: betas of parameter group 1 of ",
}


def said(world: World) -> list[str]:
    found = []
    for names in CASES:
        model, optimizer = (f"{HERE}:{name}" if name in globals() else name for name in names)
        config = Config(model=ModelConfig(model=model), optim=OptimConfig(optimizer=optimizer))
        found.append(made_otherwise(config, images(), world)[0])
    return found


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_follows_the_number_of_processes_is_said_in_the_same_words_on_any_number_of_them(n: int) -> None:
    for sentences in run_ranks(said, n):
        for sentence, expected in zip(sentences, CASES.values(), strict=True):
            assert sentence.startswith(f"weights will differ {expected}" if expected else "")
            assert bool(sentence) == bool(expected), sentence


def shared(world: World) -> tuple[list[int], float]:
    model = Ordered()
    model.order = [7, 5, 3] if world.rank else [7, 2, 4]
    _share_state(model, world, ["order[1]"])  # the others came to the same when it was made again
    config = Config(model=ModelConfig(model="mlp"), optim=OptimConfig(optimizer=f"{HERE}:noise_of_rank"))
    optimizer: Any = assemble(config, world).step.optimizer
    return model.order, optimizer.noise.random()


def test_a_list_of_which_some_elements_are_others_by_chance_and_an_optimizers_generator_are_everyones() -> None:
    first, second = run_ranks(shared, 2)
    assert first == second == ([7, 2, 4], np.random.default_rng(0).random())


def test_a_pretended_world_of_none_is_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = dict(os.environ)
    with pretended_rank(0, 2):
        with pretended_rank(0, 0):
            assert (processes(), "RANK" in os.environ) == (1, False)
        assert (processes(), os.environ["RANK"]) == (2, "0")
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    own = os.getpid() << 9
    with pretended_process(3):
        assert os.getpid() == own + 3
        with pretended_process(1000):
            assert os.getpid() == own + 488
        assert os.getpid() == own + 3


REFUSING = """
from lockstep.errors import UserError
from torch import nn
class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        raise UserError("this net takes nothing", "Take another one.")
"""


@pytest.mark.slow
def test_a_refusal_in_a_user_s_code_is_said_in_the_same_words_on_any_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(REFUSING)
    words, args = set(), ("train", "digits", "--model", "nets:Net", "--device", "cpu")
    for n in ("1", "2"):
        ended = run_lockstep(*args, "--nproc", n, "--out", n, cwd=tmp_path)
        assert ended.code == 2, ended.text
        words.add(tuple(map(neutral, ended.err.splitlines())))
    assert len(words) == 1
    assert any("raise UserError" in line for line in words.pop())
