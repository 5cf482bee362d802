"""Names that torch and Python keep to themselves and that Lockstep uses all the same; which torch lacks one."""

import ast
import inspect
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

SOURCE = Path(__file__).parents[1] / "src" / "lockstep"
# public ones, of os, sys, ast and named tuples
DOCUMENTED = {"_exit", "_current_frames", "_fields", "_asdict", "_replace"}

# where torch or Python has each, and what it gives that no public name does
USED = {
    "torch.utils.data.dataloader._BaseDataLoaderIter": (
        "which samples a loader of the user's script delivers, and in which pass"
    ),
    "torch.utils._device": "the module of torch's default device, which a pretended GPU can be",
    "torch.utils._python_dispatch": "each operator before it runs: collectives in forward or backward",
    "torch.utils._device._device_constructors": "which of torch's functions make tensors on a device",
    "torch.utils.data._utils.fetch._MapDatasetFetcher": (
        "which random numbers reading a batch draws, in the process that reads it"
    ),
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "where workers that live on begin another pass",
    "torch.utils.data._utils": "the package of a loader's fetchers",
    "torch.nn.modules.batchnorm._BatchNorm": "what torch's, timm's and a user's batch normalisations have in common",
    "torch._foreach_norm": "the largest magnitudes of a bucket's gradients by a few kernels",
    "torch._foreach_lerp_": "moves all averages by a few kernels, as torch's optimizers do",
    "torch.testing._internal": "the store of torch's process group for tests, whose collectives wait for nobody",
    "torch.distributed.distributed_c10d._World": "what torch knows of groups: a rank that pretends has another object",
    "torch.distributed.distributed_c10d._update_default_pg": "the same: the real group is put aside, and back",
    "torch._foreach_mul_": "DDP's mean becomes a sum by a few kernels, and not one for each parameter",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "whether somebody hears of every optimizer's step before it",
    "torch.optim.optimizer._global_optimizer_post_hooks": "whether somebody hears of every optimizer's step after it",
    "torch.autograd._profiler_enabled": "whether a profiler is to be told of an update",
    "torch.distributed.fsdp._fully_shard": "the module from which others may have imported fully_shard already",
    "torch._dynamo": "the compiler's list of torch's functions, which it makes before they are replaced",
    "torch.utils._pytree": "the tensors in whatever a module gets or returns",
    "torch._C": "the home of the next one",
    "torch._C._current_graph_task_id": (
        "whether a thread is autograd's, in a backward pass: checkpointed parts draw again there"
    ),
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "DDP's clocks",
    "torch.nn.parallel.DistributedDataParallel._set_ddp_runtime_logging_sample_rate": "how often DDP reads its clocks",
    "torch.distributed.distributed_c10d._get_default_store": "the store through which the ranks met, whoever opened it",
    "torch.distributed.ProcessGroup._get_backend": "what counts a group's collectives on a device",
    "torch.distributed.ProcessGroup._device_types": "the devices that a group has a backend for",
    "torch.distributed.ProcessGroupGloo._get_sequence_number_for_group": (
        "how many collectives this rank has begun: who is behind in a hang"
    ),
    "torch.autograd.graph._engine_run_backward": (
        "the frame of a backward pass, in a stack; the pass without a sixth of a tiny step's time around it"
    ),
    "atexit._clear": "a forked worker without what its launcher wanted done at its end",
    "atexit._run_exitfuncs": "a worker with what its own code wants done at its end, which multiprocessing leaves out",
    "threading._shutdown": (
        "waits for threads as the interpreter does at its end, executors of concurrent.futures included"
    ),
}
OF_OBJECTS: dict[str, tuple[Callable[[], object], str]] = {
    "_buffers": (
        lambda: nn.BatchNorm1d(1),
        "the places of a module's buffers, empty ones too, whichever tensor is there",
    ),
    "_compiled_call_impl": (lambda: nn.Module(), "whether module.compile() was called"),
    "_backward_hooks": (lambda: nn.Parameter(torch.zeros(1)), "hooks on a parameter, which are called once a step"),
    "_backward_pre_hooks": (lambda: nn.Linear(1, 1), "hooks of a module, without which its passes are taken again"),
    "_post_accumulate_grad_hooks": (
        lambda: nn.Parameter(torch.zeros(1)),
        "the same, of the kind that gets the parameter",
    ),
    "_version": (lambda: torch.zeros(1), "whether forward has written into a parameter"),
    "_optimizer_step_pre_hooks": (
        lambda: torch.optim.SGD([torch.zeros(1)]),
        "whether something that may draw runs before an optimizer's step",
    ),
    "_optimizer_step_post_hooks": (
        lambda: torch.optim.SGD([torch.zeros(1)]),
        "whether something that may draw runs after an optimizer's step",
    ),
    "_orig_mod": (
        lambda: torch.compile(nn.Identity(), backend="eager"),
        "the module inside what torch.compile(module) returned",
    ),
}

# of what multiprocessing keeps while it imports the main script in a worker
INHERITING = "_inheriting"
LISTED = {*OF_OBJECTS, INHERITING, *(place.rpartition(".")[2] for place in USED)}


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
    found, unknown = set(), []
    for path in sorted(SOURCE.rglob("*.py")):
        for line, name in private_names(ast.parse(path.read_text())):
            found.add(name)
            if name not in LISTED | DOCUMENTED:
                unknown.append(f"{path}:{line}: {name} is private: use a public name, or list it in {__file__}")
    assert not unknown, "\n".join(unknown)
    assert not LISTED - found, "nobody uses these any more"


@pytest.mark.parametrize("place", USED)
def test_the_private_name_is_still_there(place: str) -> None:
    try:
        resolve_name(place)
    except (ImportError, AttributeError):
        pytest.fail(f"torch {torch.__version__} has no {place}: {USED[place]}")


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_the_private_attribute_is_still_there(name: str) -> None:
    make, why = OF_OBJECTS[name]
    assert hasattr(make(), name), f"torch {torch.__version__} has no {name}: {why}"


def test_they_mean_what_they_did() -> None:
    assert torch.zeros(1).add_(1)._version == 1
    assert torch._C._current_graph_task_id() == -1
    assert torch.autograd._profiler_enabled() is False  # type: ignore[attr-defined]
    assert nn.BatchNorm1d(1)._buffers.keys() >= {"running_mean"}
    assert f"current_process().{INHERITING} = True" in inspect.getsource(spawn)
    for place in (
        *("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._reset", "torch.utils.data._utils.fetch"),
        *("torch.utils.data._utils.fetch._MapDatasetFetcher.fetch", "torch.distributed.fsdp._fully_shard.fully_shard"),
        *(f"torch.distributed.distributed_c10d._world.{name}" for name in ("default_pg", "group_count")),
    ):
        resolve_name(place)


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
