"""Interrupted + resumed = uninterrupted: the ledger always, in exact mode the weights, whatever N before and after."""

import dataclasses
import json
import random
import signal
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery, SamplesConfig
from lockstep.config.fields import with_values
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import assemble
from lockstep.training.control import Agreement, Control
from lockstep.training.loop import train
from lockstep.training.step import TrainStep
from tests.journals import read
from tests.ranks import alone, run_ranks

EXACT = Config(
    batch_size=30,
    exact=4,
    epochs=3,
    data=DataConfig(dataset="digits", fraction=0.1, crop_padding=1, flip=True),  # 144 samples: 5 steps, the last of 24
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(optimizer="adamw", lr=0.01, ema=0.9, warmup_epochs=0.5),
    execution=Execution(log_every=3, eval_batch_size=200, loader="resident"),
    recovery=Recovery(checkpoint_every="4steps", check_every=3, hang_timeout=60),
)
BY_A_WORKER = {"loader": "streaming", "workers": 1}
AUGMENTED = with_values(EXACT, {"augment": ("randaugment:2,9", "tests.data.test_transforms:own"), **BY_A_WORKER})
PLAIN = dataclasses.replace(EXACT, exact=0, accumulate=2, optim=OptimConfig(lr=0.05))
MIXED = dataclasses.replace(EXACT, samples=SamplesConfig("equal", 2, mixup=0.4, cutmix=1.0))
STREAMING = with_values(PLAIN, BY_A_WORKER)
STEPS = 15


def trained(world: World, config: Config, folder: str, stop_at: int = 0) -> int:
    """`train`, stopped by the agreement of all ranks after `stop_at` steps."""
    agree = Control.agree

    def stopping(self: Control, steps: int, failed: bool = False, now: bool = False) -> Agreement:
        agreed = agree(self, steps, failed, now)
        return dataclasses.replace(agreed, stop=signal.SIGTERM) if steps == stop_at else agreed

    with mock.patch.object(Control, "agree", stopping):
        return train(config, world, Path(folder), sources={"the source of nets": str(stop_at)}).stop


def all_of(world: World, jobs: list[tuple[Any, ...]]) -> list[int]:
    return [trained(world, *job) for job in jobs]


def run_jobs(jobs: dict[int, list[tuple[Any, ...]]]) -> None:
    for n, mine in jobs.items():
        run_ranks(all_of, n, mine, timeout=120 + 30 * len(mine))


def end_of(folder: Path) -> dict[str, Any]:
    end = read(folder / "journal.jsonl")[-1]
    assert end["kind"] == "end"
    return end


def check(tmp_path: Path, cases: list[tuple[str, Config, *tuple[int, ...]]]) -> None:
    """cases: (name, config, N, stop after so many steps, N that goes on, stop, N, ...), the longest first."""
    configs = {config: tmp_path / f"whole-{i}" for i, config in enumerate(dict.fromkeys(c[1] for c in cases))}
    run_ranks(all_of, 2, [(config, str(folder)) for config, folder in configs.items()], timeout=300)
    for part in range((len(cases[0]) - 1) // 2):
        jobs: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        longer = [case for case in cases if len(case) > 2 * part + 2]
        stops: list[Any] = [(name, config, *(*numbers, 0)[2 * part :][:2]) for name, config, *numbers in longer]
        for name, config, n, at in stops:
            jobs[n].append((config, str(tmp_path / name), at))
        run_jobs(jobs)
        for name, _, _, at in stops:
            if at:
                end = end_of(tmp_path / name)
                assert (end["status"], end["steps"]) == ("interrupted", at), name
    for name, config, *_ in cases:
        whole, end = end_of(configs[config]), end_of(tmp_path / name)
        assert end["status"] == "completed", name
        assert end["steps"] == whole["steps"] == STEPS
        assert end["ledger_sha256"] == whole["ledger_sha256"], name
        if config.exact:
            assert end["weights_sha256"] == whole["weights_sha256"], name
            assert (end["top1"], end["loss"]) == (whole["top1"], whole["loss"]), name


def test_resume_at_the_very_next_sample_on_another_number_of_processes(tmp_path: Path) -> None:
    check(
        tmp_path,
        [
            ("middle of an epoch, and end of one before its evaluation", EXACT, 3, 7, 1, 10, 3),
            ("streaming", STREAMING, 3, 4, 1, 6, 3),
        ],
    )


def test_an_exact_run_is_not_resumed_where_kernels_round_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(trained, EXACT, str(tmp_path), 7)
    monkeypatch.setattr("lockstep.parallel.determinism.device_name", lambda _: "another one")
    with pytest.raises(UserError, match=r"device: .* -> another one\n.*--override rounding"):
        alone(trained, EXACT, str(tmp_path))


@pytest.mark.slow(25)
def test_random_interruptions_and_those_at_the_ends_of_a_run_and_of_what_is_drawn(tmp_path: Path) -> None:
    """Three of each of eight runs, which go on with another number of processes each time; one of each other."""
    draw = random.Random(0)
    cases: list[Any] = []
    for i in range(8):
        numbers = [draw.randint(1, 4)]
        for at in sorted(draw.sample(range(1, STEPS), 3)):
            numbers += at, draw.choice([n for n in (1, 2, 3, 4) if n != numbers[-1]])
        cases.append((f"case-{i}", draw.choice([EXACT, EXACT, PLAIN, STREAMING]), *numbers))
    cases += [
        ("first step", EXACT, 1, 1, 3),
        ("end of the last epoch, before its evaluation", EXACT, 3, STEPS, 1),
        ("mixed", MIXED, 3, 7, 1),
        ("augmented", AUGMENTED, 1, 7, 3),
    ]
    check(tmp_path, cases)


def test_another_experiment_is_refused_with_a_diff(tmp_path: Path) -> None:
    config, folder = PLAIN, tmp_path / "run"
    alone(trained, config, str(folder), 7)
    hotter = with_values(config, {"lr": 0.5})
    with pytest.raises(Exception, match=r"optim.lr: 0.05 -> 0.5\n.*--override optim.lr"):
        alone(trained, hotter, str(folder))
    other = dataclasses.replace(config, batch_size=20)
    with pytest.raises(Exception, match=r"batch_size: 30 -> 20\n.*can't change: other samples"):
        alone(trained, other, str(folder))
    alone(trained, with_values(hotter, {"override": ("lr",)}), str(folder))
    assert end_of(folder)["status"] == "completed"
    assert json.loads((folder / "config.json").read_text())["optim"]["lr"] == 0.5


def test_what_follows_from_epochs_needs_no_override_of_its_own(tmp_path: Path) -> None:
    config, folder = PLAIN, tmp_path / "run"
    short = with_values(config, {"epochs": 1, "warmup_epochs": 0.5})
    longer = with_values(config, {"epochs": 2, "warmup_epochs": 1.0})
    alone(trained, short, str(folder))
    with pytest.raises(UserError, match=r"(?s)epochs: 1 -> 2.*warmup_epochs: 0.5 -> 1.0.*--override epochs if"):
        alone(trained, longer, str(folder))
    alone(trained, with_values(longer, {"override": ("epochs",)}), str(folder))
    assert end_of(folder)["status"] == "completed"
    other = with_values(longer, {"epochs": 3, "warmup_epochs": 0.75, "override": ("epochs",)})
    with pytest.raises(UserError, match=r"--override optim.warmup_epochs if"):
        alone(trained, other, str(folder))


def poisoned(world: World, config: Config, folder: Path, step: int) -> list[int]:
    """Train with one rank's images of one step blown up; returns the steps that were left out."""

    class Spoiled(TrainStep):
        def take(self, batch: Any) -> Any:
            if batch.step == step and world.rank == world.size - 1:
                batch.images.fill_(float("nan"))
            return super().take(batch)

    def spoiling(*args: Any) -> Any:
        run = assemble(*args)
        run.step.__class__ = Spoiled
        return run

    with mock.patch("lockstep.training.loop.assemble", spoiling):
        return train(config, world, folder).state.skipped


def answers(world: World, place: Path) -> list[Any]:
    found: list[Any] = []
    for answer in ("rollback", "skip", "stop"):
        config = dataclasses.replace(PLAIN, model=ModelConfig(model="mlp"), on_nonfinite=answer)
        try:
            found.append(poisoned(world, config, place / answer, 6))
        except UserError as error:
            found.append(error.message)
    return found


def test_a_non_finite_loss_has_one_answer_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(answers, 2, tmp_path)
    assert first == second
    assert first[:2] == [[6], []]  # what is skipped is counted by the step
    assert "non-finite at step 7 on rank(s) 1" in first[2]
    records = read(tmp_path / "rollback" / "journal.jsonl")
    faults = [r for r in records if r["kind"] == "fault"]
    assert [(f["fault"], f["step"], f["back_to"]) for f in faults] == [("rollback", 7, 4)]
    assert records[-1]["status"] == "completed"
    assert records[-1]["samples"] == 3 * 144 - 30
    end = end_of(tmp_path / "skip")
    assert end["status"] == "completed"
    assert end["skipped"] == 1
    assert end["ledger_sha256"] == records[-1]["ledger_sha256"]  # both have trained on all but that batch


class Keeps(nn.Module):
    """Keeps in every kind of place what its next pass uses, and no state_dict has."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        del in_channels
        self.mean: Tensor
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)).double()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64), persistent=False)
        self.calls, self.noise = 0, torch.Generator().manual_seed(1)
        self.last: Tensor | None = None
        self.recent, self.passes = deque([1.0, 1.0]), array("d", [0.0])
        self.teacher = [nn.Linear(64, num_classes).double().requires_grad_(False)]
        self.net.register_forward_hook(self._note)

    def _note(self, *_: object) -> None:
        self.calls += self.training

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        scale = 1 + self.mean + self.calls / 10 + sum(self.recent)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1
            scale = scale + torch.rand(1, generator=self.noise)
            self.recent.append(self.recent.popleft() / 2)
            self.passes[0] += 0.1
            self.teacher[0].weight.lerp_(self.net[1].weight.detach(), 0.1)
            self.last = torch.ones(3) if self.last is None else self.last + 1
        return self.net(x) / (scale + self.passes[0]) + self.teacher[0](x.flatten(1))


class Fills(Keeps):
    """What begins empty, and is there as a whole after some steps; hooks on parameters that count."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.shadow: dict[str | int, Tensor] = {}
        self.average: dict[str, list[Tensor]] | None = None
        self.level = np.float32(3)
        self.pair, self.norms, self.passed = (0, 1.0), list[tuple[float, Tensor]](), deque[int](maxlen=3)
        for p in self.net.parameters():
            p.register_hook(_warming(20 * p.ndim))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for i, (name, p) in enumerate(self.net.named_parameters()):
                for key in (name, i):
                    self.shadow[key] = 0.9 * self.shadow.get(key, p.detach()) + 0.1 * p.detach()
            ones = [torch.ones(())] if self.average is None else self.average["ones"]
            self.average = {"ones": [each + 0.1 for each in ones]}
            self.pair = (self.pair[0] + 1, self.pair[1] / 2)
            self.norms.append((float(x.norm()), x.mean()))
            self.level = np.float32(0.9) * self.level + np.float32(x.mean().item())
            self.passed.append(len(self.norms))
            x = x + sum(v.mean() for v in self.shadow.values()) + self.average["ones"][0] + sum(self.pair)
            x = x + sorted(self.norms)[len(self.norms) // 2][0] / 100 + self.norms[0][1]
            x = x + float(self.level) + sum(self.passed)
        return super().forward(x / 10)


def _warming(steps: int) -> Callable[[Any], Any]:
    taken = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        return gradient * min(1, taken / steps)

    return hook


class Warm(torch.optim.SGD):
    """Counts its steps in an attribute."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.taken
        return super().step(closure)


def warm(model: nn.Module, optim: OptimConfig, lr: float) -> Warm:
    return Warm(model.parameters(), lr)


class Optimistic(torch.optim.SGD):
    """Goes by the gradients before, which it keeps by parameter and by its id."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: dict[Tensor, Tensor] = {}
        self.by_id: dict[int, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            now = p.grad.clone()
            p.grad += (now - self.before.get(p, now)) / 2 + (now - self.by_id.get(id(p), now)) / 4
            self.before[p] = self.by_id[id(p)] = now
        return super().step(closure)


def optimistic(model: nn.Module, optim: OptimConfig, lr: float) -> Optimistic:
    return Optimistic(model.parameters(), lr)


def hooked(model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.SGD:
    """A scheduler that a hook on the optimizer moves, and a hook that counts."""
    made, warming, norms = torch.optim.SGD(model.parameters(), lr, momentum=0.9), _warming(40), list[float]()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=1, threshold=0.5)

    def hook(*_: object) -> None:
        for p in model.parameters():
            p.grad = warming(p.grad)
        norms.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        plateau.step(norms[0] if len(norms) < 2 else sum(norms[-2:]))

    made.register_step_pre_hook(hook)
    return made


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose groups are its own, as in public repositories; it keeps weights in its state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults, self.taken = base, base.param_groups, base.defaults, 0
        self.state = {}  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.taken += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state.setdefault(p, {"slow": p.clone()})["slow"]
            if self.taken % 4 == 0:
                p.copy_(slow.add_(p - slow, alpha=0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


def looking_ahead(model: nn.Module, optim: OptimConfig, lr: float) -> Lookahead:
    return Lookahead(torch.optim.SGD(model.parameters(), lr, momentum=0.9))


class Wrapped(Lookahead):
    """Gives the other's groups by a property, as schedule-free's wrapper does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.defaults, self.taken, self.state = base, base.defaults, 0, {}  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups


def wrapped(model: nn.Module, optim: OptimConfig, lr: float) -> Wrapped:
    return Wrapped(torch.optim.SGD(model.parameters(), lr, momentum=0.9))


@pytest.mark.parametrize("model", ["Keeps", "Fills"])
@pytest.mark.parametrize("optimizer", ["warm", "optimistic", "hooked", "looking_ahead", "wrapped"])
def test_what_no_state_dict_holds_is_carried(tmp_path: Path, model: str, optimizer: str) -> None:
    config = dataclasses.replace(
        PLAIN,
        accumulate=1,
        model=ModelConfig(model=f"{__name__}:{model}"),
        optim=OptimConfig(optimizer=f"{__name__}:{optimizer}", lr=0.05, schedule="cosine"),
    )
    straight, stopped = str(tmp_path / "straight"), str(tmp_path / "stopped")
    alone(trained, config, straight)
    alone(trained, config, stopped, 7)
    alone(trained, config, stopped)
    end, other = (read(Path(folder, "journal.jsonl"))[-1] for folder in (straight, stopped))
    assert end["weights_sha256"] == other["weights_sha256"]


class Pair(NamedTuple):
    calls: int = 0


class Grows(Keeps):
    """What no checkpoint holds, as a list of modules, beside what one does."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.seen: list[float | Tensor | object] = []
        self.pair, self.table = Pair(), np.zeros(1, [("calls", int)])

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += [0.5, torch.ones(2), self]
            self.pair = self.pair._replace(calls=self.pair.calls + 1)
            self.table["calls"] += 1
        return super().forward(x)


def test_a_run_with_a_list_that_grows_is_resumed_without_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(PLAIN, accumulate=1, model=ModelConfig(model=f"{__name__}:Grows"))
    for stop_at in (7, 0):
        alone(trained, config, str(tmp_path), stop_at)
        assert "no checkpoint holds seen, pair, table, which training moves" in (said := capfd.readouterr().out)
        assert ("since step 7 the source of nets has changed" in said) == (stop_at == 0)
    assert end_of(tmp_path)["status"] == "completed"
