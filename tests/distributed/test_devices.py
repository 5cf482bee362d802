"""Any accelerator that torch knows: what is asked of torch's generic calls, and where NVIDIA's own remain."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config import Execution
from lockstep.config.execution import processes_on
from lockstep.data import loaders as readers
from lockstep.distributed.devices import (
    device_name,
    device_type,
    devices,
    has_streams,
    peak_gib,
    process_count,
    rank_device,
)
from lockstep.distributed.proc import threads_each
from lockstep.distributed.world import join
from lockstep.errors import UserError

ROOT = Path(__file__).parents[2]
XPU, OTHER = torch.device("xpu", 1), torch.device("privateuseone", 0)

# (file, what) -> why no generic call takes its place
ALLOWED = {
    ("src/lockstep/training/precision.py", "torch.backends.cuda"): "TF32 is NVIDIA's",
    ("src/lockstep/training/precision.py", "torch.backends.cudnn"): "its convolutions use TF32 unless told not to",
    ("src/lockstep/training/precision.py", "'cuda'"): "TF32 is NVIDIA's",
    ("src/lockstep/parallel/determinism.py", "torch.backends.cudnn"): "its autotuner chooses kernels by their speed",
    ("src/lockstep/config/execution.py", "'cuda'"): "the flag's values",
    ("src/lockstep/errors.py", "'cuda'"): "what somebody means who types gpu",
    ("src/lockstep/parallel/batchnorm.py", "'cuda'"): "torch's fused batch normalisation is compiled for CUDA and ROCm",
    ("src/lockstep/distributed/devices.py", "'cuda'"): "what hides GPUs, and where to look for them, by kind",
    ("benchmarks/gpu.py", "torch.backends.cudnn"): "the tutorials' side keeps torch's own TF32 setting",
    ("benchmarks/gpu.py", "'cuda'"): "TF32 is measured where it exists",
}


NVIDIA_S = (  # folders below
    "src/lockstep/commands/doctor/",  # whether driver, CUDA, NCCL and torch agree has no generic name
    *(f"src/lockstep/commands/{each}/" for each in ("lint", "audit", "reproduce")),  # about scripts written for CUDA
)


def nvidia(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) for each use of torch.cuda, its backends, `.is_cuda`, `.cuda()` and the word "cuda"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if chain in ("torch.cuda", "torch.backends.cuda", "torch.backends.cudnn"):
                yield node.lineno, chain
            elif node.attr in ("is_cuda", "cuda") and not chain.startswith("torch."):
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[0] == "cuda":
            yield node.lineno, "'cuda'"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if any(f"{module}{each.name}.".startswith("torch.cuda.") for each in node.names):
                yield node.lineno, "torch.cuda"


def test_nvidia_s_own_calls_stand_only_where_nothing_generic_does_the_same() -> None:
    found = {
        (str(path.relative_to(ROOT)), what): f"{path.relative_to(ROOT)}:{line} {what}"
        # programs on pages, in folders of examples/, are as people write them for NVIDIA's
        for path in sorted(
            each for glob in ("src/**", "benchmarks/**", "examples") for each in ROOT.glob(f"{glob}/*.py")
        )
        if "cud" in (source := path.read_text())  # to parse all takes seconds
        for line, what in nvidia(source)
    }
    strange = [where for key, where in found.items() if key not in ALLOWED and not key[0].startswith(NVIDIA_S)]
    assert not strange, f"use torch.accelerator or torch.get_device_module(device): {strange}"
    assert not set(ALLOWED) - set(found), "no longer in use"


def test_each_use_would_be_seen_and_generic_calls_are_not_mistaken_for_them() -> None:
    uses = "torch.cuda.synchronize(); model.cuda(); x.is_cuda; torch.device('cuda:1'); torch.backends.cudnn.x = True"
    assert sorted(found for _, found in nvidia(uses)) == sorted(
        ["torch.cuda", ".cuda", ".is_cuda", "'cuda'", "torch.backends.cudnn"]
    )
    for line in ("import torch.cuda", "from torch import cuda", "from torch.cuda.amp import autocast"):
        assert [found for _, found in nvidia(line)] == ["torch.cuda"]
    generic = "torch.accelerator.synchronize(); torch.backends.mps.is_available(); say('CUDA_VISIBLE_DEVICES, cuda')"
    assert not list(nvidia(generic))


# A machine with another accelerator


class Accelerator:
    """torch.accelerator where there are `count` devices of a kind, of which a process was told `index`."""

    def __init__(self, kind: str, count: int, built_for: str | None = None) -> None:
        self.kind, self.count, self.built_for, self.index = kind, count, built_for or kind, -1

    def current_accelerator(self, check_available: bool = False) -> torch.device | None:
        if check_available and not self.count:
            return None
        return torch.device(self.built_for) if self.built_for != "cpu" else None

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, index: int) -> None:
        self.index = index


def put(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Accelerator:
    found = Accelerator(*args)
    monkeypatch.setattr(torch, "accelerator", found)
    return found


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_gpus_are_those_of_the_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    accelerator = put(monkeypatch, kind, 2)
    assert device_type(Execution()) == device_type(Execution(gpus=(1,))) == kind
    assert devices(Execution()) == [torch.device(kind, 0), torch.device(kind, 1)]
    assert devices(Execution(gpus=(1, 0))) == [torch.device(kind, 1), torch.device(kind, 0)]
    assert devices(Execution(device="cpu")) == [torch.device("cpu")]
    with join(Execution(gpus=(1,), threads=1), {}) as world:
        assert world.device == torch.device(kind, 1)
    assert accelerator.index == 1
    with pytest.raises(UserError, match="there is no GPU 2, this machine shows 2") as caught:
        devices(Execution(gpus=(2,)))
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
    with pytest.raises(UserError, match="--gpus 0 with --device cpu"):
        devices(Execution(gpus=(0,), device="cpu"))


@pytest.mark.parametrize("asked", [{"device": "cuda"}, {"device": "xpu"}, {"gpus": (0,)}], ids=str)
@pytest.mark.parametrize(("built_for", "words"), [("cuda", "cuda"), ("xpu", "xpu"), ("cpu", "the CPU alone")])
def test_a_missing_accelerator_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch, built_for: str, words: str, asked: dict[str, Any]
) -> None:
    put(monkeypatch, built_for, 0)
    assert devices(Execution()) == [torch.device("cpu")]
    with pytest.raises(UserError, match=rf"this machine has no such device .* for {words}") as caught:
        devices(Execution(**asked))
    for place in ("nvidia-smi", "ZE_AFFINITY_MASK", "--device cpu"):
        assert place in caught.value.remedy


def test_a_process_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun --gpus-per-task=1 leaves it: four processes on the machine, each in sight of one GPU."""
    put(monkeypatch, "cuda", 1)
    assert [rank_device(Execution(), rank, 4) for rank in range(4)] == [torch.device("cuda", 0)] * 4
    put(monkeypatch, "cuda", 4)
    assert [rank_device(Execution(), rank, 4).index for rank in range(4)] == [0, 1, 2, 3]


def test_streams_are_for_devices_that_have_several_queues() -> None:
    kinds = {kind: has_streams(torch.device(kind)) for kind in ("cpu", "cuda", "xpu")}
    assert kinds == {"cpu": False, "cuda": True, "xpu": True}


# Memory


def test_free_memory_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", {XPU: (300, 1000)}.__getitem__)
    images = SimpleNamespace(nbytes=151)
    assert not readers._fits(images, XPU)  # type: ignore[arg-type]
    assert readers._fits(images, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_device_s_peak_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    held = {gpu: 1 << 29}
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", held.__getitem__)
    assert peak_gib(gpu) == 0.5
    assert 0 < peak_gib(torch.device("cpu")) < 1 << 20


# Time


def test_a_device_without_a_name_is_called_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {XPU: SimpleNamespace(get_device_name=lambda device: f"Arc on {device}"), OTHER: SimpleNamespace()}
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)
    assert device_name(XPU) == "Arc on xpu:1"
    assert device_name(OTHER) == "privateuseone"
    assert device_name(torch.device("cpu")).startswith("cpu (")


def test_auto_is_a_process_for_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [processes_on(cores) for cores in (1, 2, 3, 4, 6, 16, 128)] == [1, 1, 1, 2, 3, 8, 8]
    for cores in (1, 2, 5, 12, 64):
        monkeypatch.setattr("lockstep.distributed.devices.cores", lambda cores=cores: cores)
        monkeypatch.setattr("lockstep.distributed.proc.cores", lambda cores=cores: cores)
        count = process_count(Execution(device="cpu"))
        assert count == processes_on(cores)
        assert count * threads_each(0, count) <= cores  # no core has two threads
        assert process_count(Execution(device="cpu", nproc=5)) == 5
