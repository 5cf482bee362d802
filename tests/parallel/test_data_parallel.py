"""DataParallel's traps, shown to be closed on copies that all live on the CPU: torch's own accepts GPUs alone."""

import importlib
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import Config, Execution, ModelConfig
from lockstep.config.fields import with_values
from lockstep.config.recipes import recipe
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel import strategy
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.data_parallel import Replicas, data_parallel, driven, replica_devices, require_gpus
from lockstep.parallel.module_state import replaced
from lockstep.parallel.strategy import parallelize, sync_of
from lockstep.rng.generators import seeding
from lockstep.training.assemble import assemble
from lockstep.training.loop import train as training
from lockstep.training.summary import _unequal, summary
from tests.journals import read
from tests.parallel.test_ddp import SINGLE, network, state, train
from tests.ranks import run_ranks


class OnCpu(Replicas):
    """Replicas of which every device is the CPU: only the copies between devices are stood in for."""

    def __init__(self, model: nn.Module, count: int) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.dim, self.output_device = model, list(range(count)), 0, 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        parts = inputs[0].chunk(len(device_ids))
        return [(part,) for part in parts], [{} for _ in parts]

    def gather(self, outputs: Any, output_device: Any) -> Tensor:
        return torch.cat(outputs)


def _in_threads(modules: Any, inputs: Any, kwargs_tup: Any, devices: Any) -> list[Any]:
    """As torch's parallel_apply: gradient mode and the switch of autocast go to the threads, and nothing else."""
    gradients, autocast, outputs = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), dict[int, Any]()

    def work(i: int) -> None:
        torch.set_grad_enabled(gradients)
        with torch.autocast("cpu", enabled=autocast):
            outputs[i] = modules[i](*inputs[i], **kwargs_tup[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == len(modules), "a replica failed"
    return [outputs[i] for i in range(len(modules))]


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """The first device's are the tensors themselves, as torch has it."""
    return [[t if not d else (t.detach() if detach else t).clone() for t in tensors] for d in range(len(devices))]


@pytest.fixture(autouse=True)
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, attribute, stand_in in (
        ("replicate", "_broadcast_coalesced_reshape", _broadcast),
        ("data_parallel", "parallel_apply", _in_threads),
    ):  # modules, which functions of the same names hide
        monkeypatch.setattr(importlib.import_module(f"torch.nn.parallel.{name}"), attribute, stand_in)


SIZES = (([8, 7, 2], 1), ([8, 8, 5], 2))  # of batches, with --accumulate


def _ddp(world: World) -> list[dict[str, list[float]]]:
    found = []
    for sizes, accumulate in SIZES:
        model = network()
        train(world, parallelize(model, world, batch_norm="local"), sizes, accumulate)
        average_buffers(model, world.size)
        found.append(state(model))
    return found


def test_two_gpus_train_as_two_processes_do() -> None:
    for (sizes, accumulate), expected in zip(SIZES, run_ranks(_ddp, 2)[0], strict=True):
        model = network()
        train(SINGLE, OnCpu(model, 2), sizes, accumulate)
        found = state(model)
        assert found.keys() == expected.keys()
        for name, values in found.items():  # weights and running statistics
            assert values == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_batch_that_does_not_go_round_weighs_every_sample_alike(n: int) -> None:
    plain, copied = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    copied.load_state_dict(plain.state_dict())
    images, labels = torch.randn(n, 3, dtype=torch.float64), torch.arange(n) % 2
    for model in (plain, OnCpu(copied, 4)):
        F.cross_entropy(model(images), labels).backward()
    for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Seen(nn.Module):
    """Notes the dtype that its product comes out in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dtypes = nn.Linear(4, 4), list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.dtypes.append(y.dtype)
        return y


@pytest.mark.parametrize(
    ("context", "dtype"),
    [
        (nullcontext, torch.float32),
        (lambda: torch.autocast("cpu", torch.float16), torch.float16),  # not the CPU's default
        (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
    ],
)
def test_copies_compute_in_the_dtype_of_the_caller(context: Callable[[], Any], dtype: torch.dtype) -> None:
    model = Seen()
    with context():
        OnCpu(model, 3)(torch.randn(6, 4))
    assert model.dtypes == [dtype] * 3


def test_running_statistics_are_those_of_all_copies_and_equal_buffers_keep_their_bits() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 2))
    model.register_buffer("scale", torch.randn(1000))
    kept = model.state_dict()["scale"].clone()
    wrapped, x = OnCpu(model, 3), torch.randn(12, 3)
    wrapped(x).sum().backward()  # the average must not disturb the backward pass
    norm = model[0]
    torch.testing.assert_close(norm.running_mean, x.mean(0))  # of equal parts
    torch.testing.assert_close(norm.running_var, torch.stack([part.var(0) for part in x.chunk(3)]).mean(0))
    assert norm.num_batches_tracked == 1
    assert torch.equal(model.state_dict()["scale"], kept)
    before = norm.running_mean.clone()
    wrapped.eval()
    wrapped(torch.randn(12, 3))
    assert norm.running_mean.tolist() == before.tolist()


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_module_is_refused(how: str) -> None:
    model = nn.Linear(2, 2)
    if how == "in place":
        model.compile(backend="eager")
    inner = model if how == "in place" else torch.compile(model, backend="eager")
    with pytest.raises(UserError, match="a compiled module"):
        OnCpu(inner, 2)(torch.zeros(2, 2))  # type: ignore[arg-type]


def _gpus(count: int, kind: str = "cuda") -> list[torch.device]:
    return [torch.device(kind, index) for index in range(count)]


def test_what_it_can_t_do_is_refused() -> None:
    several = World(0, 2, 0, 2, torch.device("cuda", 0), "nccl")
    with pytest.raises(UserError, match="one process, and a launcher has started 2"):
        data_parallel(network(), several, _gpus(2))
    with pytest.raises(UserError, match="--strategy dp on xpu"):
        require_gpus(_gpus(2, "xpu"))
    require_gpus(_gpus(2))


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        (ModelConfig(batch_norm="global"), "--batch-norm global"),
        (ModelConfig(batch_norm="groups:8"), "--batch-norm groups:8"),
        (ModelConfig(compile=True), "--compile"),
    ],
)
def test_what_copies_can_t_do_is_refused_before_anything_starts(model: ModelConfig, flag: str) -> None:
    with pytest.raises(UserError, match=f"--strategy dp with {flag}: "):
        Config(execution=Execution(strategy="dp"), model=model)


def test_a_whole_run_over_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its journal and what it says; with the weights of a run over one device, as this net has no batch norm."""
    config = with_values(recipe("digits"), {"epochs": 1, "fraction": 0.1, "device": "cpu", "threads": 1})
    ends, lines = [], []
    for count in (1, 2):
        if count > 1:
            monkeypatch.setattr(strategy, "data_parallel", lambda model, world, devices: OnCpu(model, 2))
            config = with_values(config, {"strategy": "dp"})
        folder = tmp_path / str(count)
        training(config, World.single(), folder)
        lines.append(read(folder / "journal.jsonl"))
        ends.append(lines[-1][-1])
    one, two = ends
    assert two["status"] == "completed"
    assert two["top1"] == one["top1"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["ledger_sha256"] == one["ledger_sha256"]
    assert [len(end["peak_memory_gib"]) for end in ends] == [1, 2]
    assert {record["comm_wait_ms"] for record in lines[1] if record["kind"] == "step"} == {None}


def test_a_run_says_over_how_many_gpus_it_goes_and_what_batch_norm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_values(recipe("digits"), {"device": "cpu", "threads": 1})
    run = assemble(config, World.single())
    assert " x 64 on cpu," in summary(config, World.single(), run)[0]
    run.model = network()
    run.step.model = OnCpu(run.model, 2)
    first, *rest = summary(config, World.single(), run)
    assert " x 64 on 2 x cpu," in first
    assert any("each GPU's own part" in line for line in rest)
    assert not any("--nproc" in line for line in rest)


def test_unequal_devices_are_told_by_rank() -> None:
    assert _unequal(["A", "A"]) == []
    (line,) = _unequal(["A", "B", "A"])
    assert "A on ranks 0, 2; B on rank 1" in line


def test_the_devices_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert driven(nn.Linear(1, 1)) == [torch.device("cpu")]
    assert driven(model) == [torch.device("cpu"), torch.device("meta")]
    assert replica_devices(model) == []
    wrapped = OnCpu(model, 2)
    wrapped.src_device_obj, wrapped.device_ids = torch.device("cuda", 3), [3, 1]
    assert driven(wrapped) == replica_devices(wrapped) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert sync_of(wrapped).waited_ms() is None, "nobody can tell how long they waited"


def test_every_gpu_draws_its_own_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of devices that are not here, as the device module is told of them."""
    current, told = SimpleNamespace(index=0), list[tuple[int, int]]()
    module = SimpleNamespace(manual_seed=lambda seed: told.append((current.index, seed)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: replaced(current, index=index))
    reseed = seeding(_gpus(3))
    for seed in (7, 7, 8):
        reseed(seed)
    assert told[:3] == told[3:6]
    assert [index for index, _ in told[:3]] == [0, 1, 2]
    assert told[0] == (0, 7), "one GPU alone draws the same"
    assert len({seed for _, seed in told[:3] + told[6:]}) == 6
    told.clear()
    seeding(_gpus(1))(7)
    assert told == [(0, 7)]
