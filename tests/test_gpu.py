"""What only a GPU can show, beside the tests marked gpu in the other files. One command runs all: `pytest -m gpu`.

What needs no more than one process runs on the CPU too.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import HashStore

from lockstep.commands.measuring import timed
from lockstep.data.loaders import Batch
from lockstep.distributed.devices import device_name, peak_gib
from lockstep.distributed.world import World
from lockstep.models.cifar10_speed import LargestOf
from lockstep.parallel.ddp import LockstepDDP
from lockstep.parallel.fsdp import shard, whole
from lockstep.training.evaluation import averaged
from lockstep.training.precision import configure
from lockstep.training.step import TrainStep
from tests.parallel.test_ddp import SINGLE, batch_of, network
from tests.ranks import run_ranks
from tests.subprocesses import run_lockstep

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _device(kind: str) -> torch.device:
    return torch.device(kind, 0) if kind != "cpu" else torch.device(kind)


def _need(count: int) -> list[torch.device]:
    """All GPUs, where there are so many."""
    there = torch.accelerator.device_count()
    if there < count:
        pytest.skip(f"needs {count} GPUs, and this machine shows {there}")
    return [torch.device("cuda", index) for index in range(there)]


def _batch(device: torch.device, n: int, accumulate: int, step: int) -> Batch:
    batch = batch_of(SINGLE, n, accumulate, step)
    return dataclasses.replace(batch, images=batch.images.float().to(device), labels=batch.labels.to(device))


def _trained(model: nn.Module, wrapped: nn.Module, device: torch.device, precision: str) -> list[float]:
    """Losses and weights of four steps with accumulation and clipping, the last batch short."""
    step = TrainStep(
        wrapped, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), precision=precision,
        clip_norm=1.0,
    )  # fmt: skip
    losses = [float(step(_batch(device, n, 2, t))) for t, n in enumerate((8, 8, 8, 5))]
    return [*losses, *(value for p in model.state_dict().values() for value in whole(p).flatten().tolist())]


def _model(device: torch.device) -> nn.Module:
    return network().float().to(device)


# DDP and FSDP


def _group_of_one(world: World, kind: str, precision: str, how: str) -> tuple[list[float], list[float]]:
    """The model alone, and in DDP or FSDP over a group of one process, on the backend that its device has."""
    device = _device(kind)
    configure(precision, device)
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    alone, model, single = _model(device), _model(torch.device("cpu")), World.single(device)
    wrapped = shard(model, single) if how == "fsdp" else LockstepDDP(model.to(device), single, compress=how)
    found = _trained(alone, alone, device, precision), _trained(model, wrapped, device, precision)
    dist.barrier(device_ids=None if kind == "cpu" else [0])
    dist.destroy_process_group()
    return found


WAYS = [("fp32", "none"), ("bf16", "none"), ("fp16", "bf16"), ("fp32", "fsdp"), ("bf16", "fsdp"), ("fp16", "fsdp")]


def _groups_of_one(world: World, kind: str) -> list[tuple[list[float], list[float]]]:
    return [_group_of_one(world, kind, *way) for way in WAYS]


@pytest.mark.parametrize("kind", ON)
def test_a_group_of_one_process_trains_as_the_model_alone(kind: str) -> None:
    """DDP, with compressed gradients or without, and FSDP from a model on the host."""
    for (precision, how), (alone, spread) in zip(WAYS, run_ranks(_groups_of_one, 1, kind)[0], strict=True):
        close = 1e-4 if precision == "fp32" else 3e-2
        assert spread == pytest.approx(alone, rel=close, abs=close), (precision, how)


@pytest.mark.gpu
def test_replayed_graphs_go_with_accumulation_and_with_views() -> None:
    device, ends = _need(1)[0], []
    configure("fp32", device)
    for mode in ("", "reduce-overhead"):
        model = _model(device)
        if mode:
            model.compile(mode=mode)
        trained = _trained(model, model, device, "fp32")
        views = averaged(model.eval(), _batch(device, 8, 1, 0).images, "shift").flatten().tolist()
        ends.append(trained + views)
    assert ends[1] == pytest.approx(ends[0], rel=1e-4, abs=1e-4)


@pytest.mark.gpu
def test_the_gradient_of_the_largest_activation_is_deterministic() -> None:
    device = _need(1)[0]
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.randn(4, 8, 3, 3, device=device, requires_grad=True)
        LargestOf()(x).sum().backward()  # which refuses what is not, as AdaptiveMaxPool2d's on CUDA
    finally:
        torch.use_deterministic_algorithms(False)
    largest = x == x.detach().amax((2, 3), keepdim=True)
    assert x.grad is not None
    assert torch.equal(x.grad, largest.to(x.dtype))


# The device's own clocks and memory


@pytest.mark.gpu
def test_the_device_tells_time_and_memory() -> None:
    device = _need(1)[0]
    x = torch.randn(4096, 4096, device=device)
    seconds, _ = timed(World.single(device), lambda: [x @ x for _ in range(20)][-1])
    assert seconds > 20 * 2 * 4096**3 / 1e16  # no device does ten times what the fastest ones do
    assert 0 < torch.accelerator.get_memory_info(device)[0] < 1 << 50
    assert peak_gib(device) >= x.nbytes / 2**30
    assert device_name(device) != "cuda"


# The commands


@pytest.mark.gpu
def test_processes_that_share_a_gpu_train_the_same_bits(tmp_path: Path) -> None:
    _need(1)
    flags = {"exact": 4, "epochs": 1, "fraction": 0.2, "threads": 1, "gpus": 0, "backend": "gloo"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    ends = []
    for nproc in ("1", "2"):
        ended = run_lockstep("train", "digits", *words, "--nproc", nproc, "--out", f"on{nproc}", cwd=tmp_path)
        assert ended.code == 0, ended.text
        ends.append(json.loads((tmp_path / f"on{nproc}" / "journal.jsonl").read_text().splitlines()[-1]))
    first, second = ends
    assert first["status"] == second["status"] == "completed"
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["ledger_sha256"] == second["ledger_sha256"]
    assert [len(end["peak_memory_gib"]) for end in ends] == [1, 2]


@pytest.mark.gpu
def test_compare_shows_the_memory_of_a_gpu(tmp_path: Path) -> None:
    _need(1)
    flags = {"strategies": "single,single+bf16", "nproc": 1, "epochs": 1, "log-every": 1, "out": "found"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    ended = run_lockstep("compare", "digits", *words, cwd=tmp_path, timeout=200)
    assert ended.code == 0, ended.text
    for row in json.loads((tmp_path / "found" / "results.json").read_text())["rows"]:
        assert len(row["memory_gib"]) == 1, row
        assert row["memory_gib"][0] > 0
