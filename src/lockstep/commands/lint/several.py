"""Whether a program is for several processes, and by what: the frameworks in use, groups, wrapped models."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.ddp import is_ddp
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.sites import sites


def library(program: Program, *prefixes: str) -> bool:
    """Whether a file of the program imports one of these libraries."""
    key = ("library", prefixes)
    if key not in program.memo:
        modules = {
            binding.target.partition(":")[0]
            for source in program.sources
            for binding in source.imports
            if not binding.level
        }
        program.memo[key] = any(
            each == prefix or each.startswith(f"{prefix}.") for each in modules for prefix in prefixes
        )
    return bool(program.memo[key])


def lightning(program: Program) -> bool:
    """Whether Lightning's Trainer runs the loop (Fabric leaves it to the script)."""
    return library(program, "lightning", "pytorch_lightning") and bool(program.named.get("Trainer"))


def wrapped(program: Program) -> list[ast.Call]:
    """The calls of DistributedDataParallel."""
    if "wrapped" not in program.memo:
        program.memo["wrapped"] = [*program.named.get("DistributedDataParallel", []), *_aliases(program)]
    found = program.memo["wrapped"]
    assert isinstance(found, list)
    return found


def _aliases(program: Program) -> Iterator[ast.Call]:
    for call in program.calls:
        if last_name(call.func) != "DistributedDataParallel" and is_ddp(program, call):
            yield call


@remembered
def distributed(program: Program) -> bool:
    """Whether the program runs in several processes that train one model."""
    names = (
        "init_process_group",
        "DistributedDataParallel",
        "Accelerator",
        "Fabric",
        "fully_shard",
        "DistributedSampler",
        "init_distributed_mode",
        "deepspeed",
    )
    several = [
        call
        for name in names
        for call in program.named.get(name, [])
        if not _one_device(program, call) and (name != "init_process_group" or starts_group(program))
    ]
    if several or wrapped(program) or library(program, "horovod", "deepspeed"):
        return True
    parts = [call for name in ("Parallel", "auto_model", "initialize", "spawn") for call in program.named.get(name, [])]
    ignite = any(qualified(program, call.func).startswith("ignite.distributed") for call in parts)
    return ignite or _several_devices(program)


def starts_group(program: Program) -> bool:
    """Whether the program comes by init_process_group."""
    return any(comes_by(program, call) for call in program.named.get("init_process_group", []))


def comes_by(program: Program, call: ast.Call) -> bool:
    """Whether a call is not in another file's function that the program never calls."""
    source = program.owner[call]
    function = function_of(source, call)
    return source is program.root or function is None or bool(sites(program, function))


def _one_device(program: Program, call: ast.Call) -> bool:
    """Fabric(devices=1)."""
    return last_name(call.func) == "Fabric" and constant(program, given(program, call, "devices")) in (1, "1")


def _several_devices(program: Program) -> bool:
    return lightning(program) and any(
        ((devices := given(program, call, "devices")) is not None and constant(program, devices) != 1)
        or given(program, call, "strategy") is not None
        for call in program.named.get("Trainer", [])
    )


def wraps(program: Program, node: ast.AST) -> list[ast.Call]:
    """The DistributedDataParallel calls that a value comes from."""
    known = wrapped(program)
    return [each for each in origins(program, node) if isinstance(each, ast.Call) and each in known]
