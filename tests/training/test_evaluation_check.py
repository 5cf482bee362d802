"""What an evaluation moves, and a step or the next batch follows, is said."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import loaders
from lockstep.training.evaluation import evaluate
from lockstep.training.step import TrainStep
from lockstep.training.step_passes import note_evaluation
from tests.training.test_equal_steps import CLASSES, Net, batch_of


class Prototypes(Net):
    def begin(self) -> None:
        self.bank: list[Tensor] = []

    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            self.bank.append(x.detach().mean(0))
        return torch.tanh(self.second(x - sum(self.bank) / max(1, len(self.bank))))


class Shown(Net):
    """Keeps what it shows of any batch, and writes into a parameter in training: both follow no samples."""

    def begin(self) -> None:
        self.slow = nn.Parameter(torch.ones(()), requires_grad=False)

    def middle(self, x: Tensor) -> Tensor:
        self.shown = x.detach()
        self.slow.mul_(0.9 if self.training else 1)
        return torch.tanh(self.second(x)) * (1 + self.slow)


@pytest.mark.parametrize("make", [Prototypes, Shown])
def test_what_an_evaluation_moves_is_said_where_the_next_step_follows_it(make: type[Net]) -> None:
    model, said = make(), list[tuple[int, str, str]]()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    step.check.report = lambda finding, _: said.append((finding.step, finding.what, finding.place))
    for t in range(12):
        step(batch := batch_of(World.single(), 12, t))
        if t >= 4:
            with note_evaluation(model, World.single()):
                model.eval()(batch.images)
            model.train()
    assert said == ([(5, "state", "bank")] if make is Prototypes else [])
    assert step.check.checked == 7, "0, 1, 2, 4 and 8; after the first evaluation, the second and the fourth, before 8"


class Carries(nn.Linear):
    """Evaluates a batch by the one before it, or keeps it alone. Of its buffer each batch finds what the first did."""

    last, follows = torch.zeros(()), True
    batches: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        y = super().forward(x.flatten(1)) * (self.batches + self.last * self.follows)
        self.last = y.mean().detach()
        return y


def test_what_a_batch_of_an_evaluation_leaves_to_the_next_is_said_where_that_follows_it(capsys: Any) -> None:
    pair = torch.randn(12, 1, 2, 2), torch.arange(12) % CLASSES
    _, val = loaders((pair, pair), World.single(), batch_size=4, workers=0)
    for follows in (False, True, True):
        model = Carries(4, CLASSES)
        model.follows = follows
        assert [evaluate(model, val, World.single()).count for _ in range(2)] == [12, 12]
        (once,) = [line for line in capsys.readouterr().err.splitlines() if "metrics will differ" in line] or [""]
        assert ("left in last" in once) == follows
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    step.own_loop, step.check.report = False, lambda finding, first: said.append((finding.what, finding.place, first))
    said: list[tuple[str, str, bool]] = []
    evaluate(Carries(4, CLASSES), val, World.single())  # another one, as its moving average is
    assert (said, capsys.readouterr().err) == ([("evaluation", "last", True)], "")
    step.check.law = "strict"
    with pytest.raises(UserError, match="--law strict: metrics will differ"):
        evaluate(Carries(4, CLASSES), val, World.single())
