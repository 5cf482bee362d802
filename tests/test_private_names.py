"""Names that torch and Python keep to themselves and that Lockstep uses all the same; which torch lacks one."""

import ast
import atexit
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.autograd import graph
from torch.nn.modules import batchnorm

SOURCE = Path(__file__).parents[1] / "src" / "lockstep"
# public ones, of os, sys, ast and named tuples
DOCUMENTED = {"_exit", "_current_frames", "_fields", "_asdict", "_replace"}


@dataclass(frozen=True)
class Use:
    """A private name: its files, what it gives them that no public name does, and whether it is there."""

    files: tuple[str, ...]
    why: str
    there: Callable[[], bool]


USED = {
    "_BaseDataLoaderIter": Use(
        ("commands/audit/recorders/loaders.py", "commands/reproduce/loaders.py"),
        "which samples a loader of the user's script delivers, and in which pass",
        lambda: hasattr(torch.utils.data.dataloader, "_BaseDataLoaderIter"),
    ),
    "_device": Use(
        ("commands/audit/pretended/tensors.py",),
        "the module of torch's default device, which a pretended GPU can be",
        lambda: importlib.util.find_spec("torch.utils._device") is not None,
    ),
    "_python_dispatch": Use(
        ("parallel/determinism.py",),
        "each operator before it runs: collectives in forward or backward",
        lambda: importlib.util.find_spec("torch.utils._python_dispatch") is not None,
    ),
    "_device_constructors": Use(
        ("commands/audit/pretended/tensors.py",),
        "which of torch's functions make tensors on a device",
        lambda: callable(importlib.import_module("torch.utils._device")._device_constructors),
    ),
    "_MapDatasetFetcher": Use(
        ("commands/audit/recorders/training.py",),
        "which random numbers reading a batch draws, in the process that reads it",
        lambda: callable(torch.utils.data._utils.fetch._MapDatasetFetcher.fetch),
    ),
    "_MultiProcessingDataLoaderIter": Use(
        ("commands/audit/recorders/loaders.py",),
        "where workers that live on begin another pass",
        lambda: callable(torch.utils.data.dataloader._MultiProcessingDataLoaderIter._reset),
    ),
    "_utils": Use(
        ("commands/audit/recorders/training.py",),
        "the package of a loader's fetchers",
        lambda: hasattr(torch.utils.data, "_utils"),
    ),
    "_BatchNorm": Use(
        (
            "commands/audit/recorders/training.py",
            "commands/audit/recorders/training.py",
            "parallel/batchnorm.py",
            "parallel/batchnorm.py",
        ),
        "what torch's, timm's and a user's batch normalisations have in common",
        lambda: hasattr(batchnorm, "_BatchNorm"),
    ),
    "_compiled_call_impl": Use(
        ("parallel/data_parallel.py", "parallel/slices.py"),
        "whether module.compile() was called",
        lambda: hasattr(nn.Module(), "_compiled_call_impl"),
    ),
    "_buffers": Use(
        ("parallel/buffers.py", "parallel/hidden_state.py", "parallel/module_state.py"),
        "the places of a module's buffers, empty ones too, whichever tensor is there",
        lambda: nn.BatchNorm1d(1)._buffers.keys() >= {"running_mean"},
    ),
    "_foreach_norm": Use(
        ("parallel/fixed_point.py",),
        "the largest magnitudes of a bucket's gradients by a few kernels",
        lambda: hasattr(torch, "_foreach_norm"),
    ),
    "_foreach_lerp_": Use(
        ("training/optimizers.py",),
        "moves all averages by a few kernels, as torch's optimizers do",
        lambda: hasattr(torch, "_foreach_lerp_"),
    ),
    "_backward_hooks": Use(
        ("training/step.py",),
        "hooks on a parameter, which are called once a step",
        lambda: nn.Parameter(torch.zeros(1))._backward_hooks is None,
    ),
    "_post_accumulate_grad_hooks": Use(
        ("parallel/exact.py", "training/step.py"),
        "the same, of the kind that gets the parameter",
        lambda: nn.Parameter(torch.zeros(1))._post_accumulate_grad_hooks is None,
    ),
    "_internal": Use(
        ("distributed/world.py",),
        "the store of torch's process group for tests, whose collectives wait for nobody",
        lambda: importlib.util.find_spec("torch.testing._internal.distributed.fake_pg") is not None,
    ),
    "_world": Use(
        ("distributed/world.py",),
        "what torch.distributed knows of groups: a rank that pretends has another one for a moment",
        lambda: hasattr(c10d._world, "default_pg") and hasattr(c10d._world, "group_count"),
    ),
    "_update_default_pg": Use(
        ("distributed/world.py", "distributed/world.py"),
        "the same: the real group is put aside, and back",
        lambda: callable(c10d._update_default_pg),
    ),
    "_foreach_mul_": Use(
        ("parallel/ddp.py",),
        "DDP's mean becomes a sum by a few kernels, and not one for each parameter",
        lambda: callable(torch._foreach_mul_),
    ),
    "_version": Use(
        (
            "commands/reproduce/recorder.py",
            "data/loaders.py",
            "parallel/ddp.py",
            "parallel/exact.py",
            "parallel/parameter_hooks.py",
            "training/evaluation.py",
            "training/outcomes.py",
            "training/step.py",
        ),
        "whether forward has written into a parameter",
        lambda: torch.zeros(1).add_(1)._version == 1,
    ),
    "_optimizer_step_pre_hooks": Use(
        ("training/updates.py",),
        "whether something that may draw runs before an optimizer's step",
        lambda: "_optimizer_step_pre_hooks" in vars(torch.optim.SGD([torch.zeros(1)])),
    ),
    "_optimizer_step_post_hooks": Use(
        ("training/updates.py",),
        "whether something that may draw runs after an optimizer's step",
        lambda: "_optimizer_step_post_hooks" in vars(torch.optim.SGD([torch.zeros(1)])),
    ),
    "_global_optimizer_pre_hooks": Use(
        ("training/updates.py",),
        "whether somebody hears of every optimizer's step before it",
        lambda: hasattr(importlib.import_module("torch.optim.optimizer"), "_global_optimizer_pre_hooks"),
    ),
    "_global_optimizer_post_hooks": Use(
        ("training/updates.py",),
        "whether somebody hears of every optimizer's step after it",
        lambda: hasattr(importlib.import_module("torch.optim.optimizer"), "_global_optimizer_post_hooks"),
    ),
    "_profiler_enabled": Use(
        ("training/step.py",),
        "whether a profiler is to be told of an update",
        lambda: torch.autograd._profiler_enabled() is False,  # type: ignore[attr-defined]
    ),
    "_fully_shard": Use(
        ("commands/audit/recorders/training.py",),
        "the module from which others may have imported fully_shard already",
        lambda: callable(importlib.import_module("torch.distributed.fsdp._fully_shard").fully_shard),
    ),
    "_orig_mod": Use(
        ("commands/reproduce/watching.py", "parallel/data_parallel.py", "parallel/strategy.py"),
        "the module inside what torch.compile(module) returned",
        lambda: hasattr(torch.compile(nn.Identity(), backend="eager"), "_orig_mod"),
    ),
    "_pytree": Use(
        (
            *("parallel/model_parallel.py", "parallel/sync.py"),
            *("training/find_cause.py", "training/losses.py", "training/self_check.py"),
        ),
        "the tensors in whatever a module gets or returns",
        lambda: importlib.util.find_spec("torch.utils._pytree") is not None,
    ),
    "_C": Use(
        ("commands/audit/pretended/tensors.py", "commands/audit/pretended/tensors.py", "rng/draws.py"),
        "the home of the next one",
        lambda: hasattr(torch, "_C"),
    ),
    "_current_graph_task_id": Use(
        ("rng/draws.py",),
        "whether a thread is autograd's, in a backward pass: checkpointed parts draw again there",
        lambda: torch._C._current_graph_task_id() == -1,
    ),
    "_get_ddp_logging_data": Use(
        ("parallel/ddp.py",),
        "DDP's clocks",
        lambda: hasattr(nn.parallel.DistributedDataParallel, "_get_ddp_logging_data"),
    ),
    "_set_ddp_runtime_logging_sample_rate": Use(
        ("parallel/ddp.py",),
        "how often DDP reads its clocks",
        lambda: hasattr(nn.parallel.DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate"),
    ),
    "_get_default_store": Use(
        ("distributed/failures.py", "monitoring/heartbeat.py"),
        "the store through which the ranks met, whoever opened it",
        lambda: hasattr(dist.distributed_c10d, "_get_default_store"),
    ),
    "_get_backend": Use(
        ("monitoring/heartbeat.py",),
        "what counts a group's collectives on a device",
        lambda: hasattr(dist.ProcessGroup, "_get_backend"),
    ),
    "_device_types": Use(
        ("monitoring/heartbeat.py",),
        "the devices that a group has a backend for",
        lambda: hasattr(dist.ProcessGroup, "_device_types"),
    ),
    "_get_sequence_number_for_group": Use(
        ("monitoring/heartbeat.py",),
        "how many collectives this rank has begun: who is behind in a hang",
        lambda: hasattr(dist.ProcessGroupGloo, "_get_sequence_number_for_group"),
    ),
    "_engine_run_backward": Use(
        ("commands/audit/pretended/tensors.py", "training/step.py", "monitoring/hang.py"),
        "the frame of a backward pass, in a stack; the pass without a sixth of a tiny step's time around it",
        lambda: hasattr(graph, "_engine_run_backward"),
    ),
    "_clear": Use(
        ("distributed/warm.py",),
        "a forked worker without what its launcher wanted done at its end",
        lambda: hasattr(atexit, "_clear"),
    ),
    "_run_exitfuncs": Use(
        ("distributed/signals.py",),
        "a worker with what its own code wants done at its end, which multiprocessing leaves out",
        lambda: hasattr(atexit, "_run_exitfuncs"),
    ),
    "_shutdown": Use(
        ("distributed/signals.py",),
        "waits for threads as the interpreter does at its end, executors of concurrent.futures included",
        lambda: callable(getattr(threading, "_shutdown", None)),
    ),
    "_inheriting": Use(
        ("distributed/warm.py",),
        "whether multiprocessing is importing the main script in a worker",
        lambda: "current_process()._inheriting = True" in inspect.getsource(spawn),
    ),
}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of what a file uses from elsewhere: attributes, imports, and names given as text."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        names: list[object] = []
        match node:
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(module=module, names=imported):
                names = [*str(module).split("."), *(alias.name for alias in imported)]
            case ast.Import(names=imported):
                names = [part for alias in imported for part in alias.name.split(".")]
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]):
                names = [name]
            case ast.Compare(comparators=[ast.Constant(value=name)]):
                names = [name]
        yield from ((getattr(node, "lineno", 0), str(name)) for name in names if is_private(name) and name not in own)


def test_every_private_name_in_the_sources_is_listed_here() -> None:
    found: dict[str, set[str]] = {name: set() for name in USED}
    unknown = []
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for line, name in private_names(ast.parse(path.read_text())):
            if name in USED:
                found[name].add(file)
            elif name not in DOCUMENTED:
                unknown.append(f"{file}:{line}: {name} is private: use a public name, or list it in {__file__}")
    assert not unknown, "\n".join(unknown)
    assert found == {name: set(use.files) for name, use in USED.items()}


@pytest.mark.parametrize("name", USED)
def test_the_private_name_is_still_there(name: str) -> None:
    use = USED[name]
    assert use.there(), f"torch {torch.__version__} has no {name}; {', '.join(use.files)} need it: {use.why}"


def test_a_new_private_name_would_be_seen() -> None:
    program = """
from torch._C._distributed_c10d import Store
import torch._dynamo
def _own(): ...
class Kept:
    def __init__(self): self._kept = _own()
print(Kept()._kept, group._secret, getattr(group, "_hidden", 0), name == "_frame", "_text")
"""
    found = {name for _, name in private_names(ast.parse(program))}
    assert found == {"_C", "_distributed_c10d", "_dynamo", "_secret", "_hidden", "_frame"}
