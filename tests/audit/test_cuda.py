"""GPU scripts hear what GPUs would say, on a CPU. Programs run in processes of their own: torch is changed there."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.subprocesses import Command

BEGIN = """
import json, os, torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lockstep.commands.audit.pretended import pretend
events = []
pretend(2, lambda event, **values: events.append({"event": event, **values}))

def refused(function, *words):
    try:
        function()
    except RuntimeError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")
"""

DEVICES = """
cuda, cpu = torch.device("cuda"), torch.device("cpu")
assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0
assert torch.accelerator.current_accelerator() == cuda
assert torch.cuda.get_device_properties(1).total_memory > 0 and torch.cuda.memory_allocated() == 0
x = torch.randn(8, 1, 4, 4)
for there in (x.cuda(), x.to("cuda"), x.to(cuda, non_blocking=True), x.to(torch.float64).to("cuda:0"), x.to(device=0)):
    assert there.is_cuda and not there.is_cpu and there.device == torch.device("cuda:0") and there.get_device() == 0
    assert (there + 1).device.type == "cuda" and there[0].sum().is_cuda and there.cpu().device == cpu and there is not x
    assert there.to("cuda:0") is there and there.to(there) is there
assert x.cuda(1).device.index == 1 and x.to("cuda:1").type() == "torch.cuda.FloatTensor" and not x.is_cuda
before = x.clone()
x.cuda().zero_()  # a copy, as on a GPU
assert torch.equal(x, before)
for made in (
    torch.zeros(2, device="cuda"), torch.arange(3, device=cuda), torch.tensor([1], device=0), torch.ones_like(x.cuda()),
    x.new_zeros(3, device="cuda"), x.cuda().new_ones(2), torch.rand(2, device=0, generator=torch.Generator("cuda")),
):
    assert made.device == torch.device("cuda:0"), made
torch.set_default_device("cuda:1")
assert torch.empty(1).device.index == 1
torch.set_default_device(None)
with torch.device("cuda"):
    assert torch.empty(1).is_cuda
assert not torch.empty(1).is_cuda
torch.cuda.set_device("cuda:1")
assert torch.zeros(1, device="cuda").device.index == torch.cuda.current_device() == 1
with torch.cuda.device(0):
    assert torch.zeros(1).cuda().device.index == 0
torch.cuda.set_device(0)

refused(lambda: torch.cuda.set_device(2), "invalid device ordinal")
refused(lambda: torch.zeros(1, device="cuda:7"), "invalid device ordinal")
refused(lambda: x.cuda() + torch.ones(4), "same device", "cpu and cuda:0")
refused(lambda: F.linear(torch.ones(2, 3).cuda(0), torch.ones(2, 3).cuda(1)), "cuda:0 and cuda:1")
refused(lambda: nn.Linear(4, 2)(torch.ones(1, 4, device="cuda")), "same device")
x.cuda() + torch.tensor(1.0)  # without dimensions: allowed
x.cuda()[torch.tensor([0, 1])]

start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
with torch.cuda.stream(torch.cuda.Stream()):
    x.cuda().record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(torch.cuda.Stream(device=1))
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0

def drawn(between):
    torch.manual_seed(5)
    torch.randn(between)  # the CPU's generator is another one
    return F.dropout(torch.ones(64).cuda()).tolist(), torch.rand(2, device="cuda").tolist()
assert drawn(1) == drawn(9)
torch.manual_seed(5)
state = torch.cuda.get_rng_state()
first = torch.randn(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first.cpu(), torch.randn(3, device="cuda").cpu())
torch.cuda.manual_seed_all(6)
assert not torch.equal(first.cpu(), torch.randn(3, device="cuda").cpu())
used = {(each["index"], each["how"]) for each in events}
assert {(0, "tensor"), (1, "tensor"), (0, "set_device"), (1, "set_device")} <= used, used
assert all(each["event"] == "device" and each["devices"] == 2 for each in events)
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
assert torch.cuda.device_count() == 1
print(json.dumps(events))
"""

TRAINING = """
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
device = torch.device("cuda:1" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))
model = model.to(device)
assert {each.device for each in (*model.parameters(), *model.buffers())} == {device}
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
assert scaler.is_enabled()
data = TensorDataset(torch.randn(12, 1, 4, 4), torch.arange(12) % 3)
scales = []
for step, (images, labels) in enumerate(DataLoader(data, 4, pin_memory=True)):
    assert not images.is_cuda
    images, labels = images.to(device, non_blocking=True), labels.cuda(1)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled("cuda")
        out = checkpoint(model, images, use_reentrant=False) if step == 1 else model(images)
        loss = F.cross_entropy(out, labels)
    assert out.device == loss.device == device
    scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
    scaler.unscale_(optimizer)
    assert all(each.grad.device == device for each in model.parameters())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
assert scales == [65536.0, 65536.0, 32768.0], scales  # the step that overflowed was skipped
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
for where, told in {None: device, "cuda:0": torch.device("cuda:0"), "cpu": torch.device("cpu")}.items():
    kept = torch.load("run.pt", map_location=where, weights_only=True)["model"]
    assert {each.device for each in kept.values()} == {told}, where
    assert all(torch.equal(each.cpu(), model.state_dict()[name].cpu()) for name, each in kept.items())
kept = torch.load("run.pt", map_location=lambda storage, place: storage.cuda(0))["model"]
assert {each.device.index for each in kept.values()} == {0}
model.load_state_dict(kept)
assert next(model.parameters()).device == device
assert torch.compile(model) is model and torch.compile()(model) is model
assert next(__import__("copy").deepcopy(model).parameters()).device == device
assert nn.DataParallel(model)(images).device == device
model.cpu()
assert not next(model.parameters()).is_cuda
model(images.cpu())
print(json.dumps(events))
"""

RANKS = """
rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
torch.cuda.set_device(rank)
here = torch.device("cuda", rank)
dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2, device_id=here)
assert dist.get_backend() == "nccl"
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).cuda()
whole, shared = net(), nn.SyncBatchNorm.convert_sync_batchnorm(net())
shared = nn.parallel.DistributedDataParallel(shared, device_ids=[rank], output_device=rank)
x = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(1))
for _ in range(2):
    for model, images in ((whole, x.cuda()), (shared, x[rank * 4:][:4])):  # DDP moves what is on the CPU
        model.zero_grad()
        out = model(images)
        assert out.device == torch.device("cuda", rank)
        (out * out).mean().backward()
for one, two in zip((*whole.parameters(), *whole.buffers()), (*shared.module.parameters(), *shared.module.buffers())):
    torch.testing.assert_close(one.cpu(), two.cpu())
    if one.requires_grad:
        torch.testing.assert_close(one.grad.cpu(), two.grad.cpu())

mean = torch.tensor([float(rank)], device="cuda")
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
later = torch.tensor([float(rank)], device="cuda")
dist.all_reduce(later, op=dist.ReduceOp.AVG, async_op=True).wait()
assert mean.item() == later.item() == 0.5
flat = torch.zeros(2, device="cuda")
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.14
gather(flat, torch.tensor([float(rank)]).cuda())
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
part = torch.zeros(1, device="cuda")
scatter(part, torch.tensor([1.0, 2.0]).cuda(), op=dist.ReduceOp.AVG)
assert part.item() == rank + 1
refused(lambda: gather(torch.zeros(2), torch.ones(1)), "No backend type associated with device type cpu")
parts = [torch.zeros(1, device="cuda") for _ in range(2)]
dist.all_gather(parts, mean)
assert flat.tolist() == [0, 1] and [each.item() for each in parts] == [0.5, 0.5]
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
refused(lambda: dist.all_reduce(torch.ones(1)), "No backend type associated with device type cpu")
dist.barrier(device_ids=[rank])
dist.destroy_process_group()
assert {(each["index"], each["how"]) for each in events} == {(rank, how) for how in (
    "set_device", "init_process_group", "tensor", "DistributedDataParallel", "barrier")}, events
print(json.dumps(events))
"""


def _run(program: str, folder: Path, ranks: int = 1) -> list[list[dict[str, Any]]]:
    """The events of each rank of a program."""
    (folder / "program.py").write_text(BEGIN + program)
    started = [
        Command(
            sys.executable,
            str(folder / "program.py"),
            cwd=folder,
            env={"RANK": str(rank), "FOLDER": str(folder)},
            warm=True,
        )
        for rank in range(ranks)
    ]
    ended = [each.end(timeout=180) for each in started]
    for each in ended:
        assert each.code == 0, each.text
    return [json.loads(each.out.splitlines()[-1]) for each in ended]


@pytest.mark.slow
def test_devices_tensors_and_random_states_are_those_of_two_gpus(tmp_path: Path) -> None:
    _run(DEVICES, tmp_path)


def test_a_mixed_precision_training_runs_and_its_files_say_where_tensors_were(tmp_path: Path) -> None:
    _run(TRAINING, tmp_path)


@pytest.mark.slow
def test_two_ranks_with_nccl_ddp_and_synchronised_batch_norm(tmp_path: Path) -> None:
    events = _run(RANKS, tmp_path, ranks=2)
    assert [{each["index"] for each in mine} for mine in events] == [{0}, {1}]
