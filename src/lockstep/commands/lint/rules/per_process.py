"""The rule about numbers of one process that are given those meant for all: batch sizes, loader workers."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.ranks import on_rank, on_world
from lockstep.commands.lint.roles import distributed, lightning, loaders, of_loader, samplers, sharding
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.evaluation import prepared


@rule(
    "LS109",
    "per-process-for-all",
    "each process takes the number that was meant for all",
    result="N times the batch, or N times the workers: on 4 processes and 16 cores 64 workers, which wait for each "
    "other",
    why="a loader's batch_size and num_workers are its own process's",
    mend="DataLoader(dataset, batch_size=global_batch // world_size, num_workers=cpus // local_world_size)",
)
def per_process_for_all(program: Program) -> Iterator[Hit]:
    """A total batch size undivided in a shared-out loader; all cores as workers in each process."""
    if not distributed(program):
        return
    told = set[tuple[object, str]]()
    for loader in loaders(program):
        if last_name(loader.func) == "auto_dataloader":
            continue  # which divides both itself
        batch = of_loader(program, loader, "batch_size")
        shared = sharding(program, loader) or prepared(program, loader) or lightning(program)
        if (
            batch is not None
            and shared
            and meant_for_all(program, batch)
            and not on_world(program, batch)
            and not depends(program, batch, _divides)
            and not _split_batches(program)
        ):
            yield Hit(batch, f"batch_size={ast.unparse(batch)}")
        yield from _of_own_sampler(program, loader)
        workers = of_loader(program, loader, "num_workers")
        if (
            workers is not None
            and (depends(program, workers, _counts_cores) or (_workers_of_all(program, workers) and shared))
            and not depends(program, workers, lambda each: _caps(each) or _divides(each))
            and not on_world(program, workers)
        ):
            place = (program.owner[workers].scopes[workers], ast.unparse(workers))
            if place not in told:  # once for all loaders of a function
                yield Hit(workers, f"num_workers={ast.unparse(workers)}")
            told.add(place)


def _of_own_sampler(program: Program, loader: ast.Call) -> Iterator[Hit]:
    """A local batch sampler that is given the whole batch beside the rank, and divides it nowhere."""
    for sampler in samplers(program, loader):
        owner = definition(program, sampler.func)
        if not isinstance(owner, ast.ClassDef) or not any(on_rank(program, each) for each in sampler.args):
            continue
        divides = [
            each for each in ast.walk(owner) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.FloorDiv)
        ]
        if any("batch" in ast.unparse(each.left) for each in divides):
            continue
        for each in [*sampler.args, *(one.value for one in sampler.keywords)]:
            if (
                isinstance(each, ast.Name | ast.Attribute)
                and meant_for_all(program, each)
                and not on_world(program, each)
            ):
                yield Hit(each, f"{ast.unparse(each)} of {ast.unparse(sampler.func)}")


def _workers_of_all(program: Program, workers: ast.expr) -> bool:
    """Whether a number of workers is that of the machine or of all processes, by its name, comment or option's help."""

    def says(each: ast.AST) -> bool:
        name = called(each)
        if not re.search(r"work|loader_proc|num_proc|cpus", name):
            return False
        if re.search(
            r"(node|machine|host|total|global|overall|all)_?(num_)?(work|cpu)|(work|cpu)\w*_(per_|of_)?(the_)?(node|machine|host|total)",
            name,
        ):
            return True
        told = f"{option(program, name)[0]} {comment(program, each)}".lower()
        return bool(_OF_MACHINE.search(told)) and not _OF_ONE.search(told)

    return depends(program, workers, says)


def _divides(node: ast.AST) -> bool:
    """batch // args.processes: by a number that is not written there, and not that of accumulated passes."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv | ast.Div):
        return False
    return not isinstance(node.right, ast.Constant) and "accum" not in ast.unparse(node.right).lower()


def _caps(node: ast.AST) -> bool:
    """min(8, cores): a number that somebody chose for one process."""
    return isinstance(node, ast.Call) and last_name(node.func) == "min"


def _counts_cores(node: ast.AST) -> bool:
    cores = ("cpu_count", "sched_getaffinity", "process_cpu_count")
    slurm = ("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE")
    return (isinstance(node, ast.Call) and last_name(node.func) in cores) or (
        isinstance(node, ast.Constant) and node.value in slurm
    )


def meant_for_all(program: Program, node: ast.expr) -> bool:
    """Whether a batch size is called that of all processes, by its name or its option's help."""

    def says(each: ast.AST) -> bool:
        name = called(each)
        if not name:
            return False
        if re.search(r"(global|total|effective|overall|whole).*(batch|bs)|batch.*(global|total)", name):
            return True
        if not re.search(r"^((train|mini)_?)?(batch(_?size)?|bs|images_per_step)$", name):
            return False
        told = f"{option(program, name)[0]} {comment(program, each)}".lower()
        return bool(_ALL.search(told)) and not _OF_ONE.search(told)

    return depends(program, node, says)


def called(node: ast.AST) -> str:
    """A value's name: a variable's, an attribute's, or that of an entry."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value.lower()
    return last_name(node).lower()


def comment(program: Program, node: ast.AST) -> str:
    """What stands behind the line that gives a name its value: a constant's, a field's, a class's attribute."""
    name = last_name(node)
    if isinstance(node, ast.Name):
        found = [(program.owner[node], each) for each in bindings(program, node, name)]
    elif isinstance(node, ast.Attribute):
        found = [
            (source, each)
            for source in program.sources
            for scope, names in source.names.items()
            if isinstance(scope, ast.ClassDef)
            for each in names.get(name, [])
        ]
    else:
        return ""
    lines = [source.lines[each.node.lineno - 1] for source, each in found if isinstance(each.node, ast.stmt)]
    return " ".join(line.partition("#")[2] for line in lines)


_WHOLE = "node|machine|host|total|global|overall"
_ALL = re.compile(
    r"(total|global|overall|whole|effective)\b|(across|over|of|on|for) all\b|in all\b|together"
    r"|(per|of an?|of one|of each) (optimizer |optimiser )?(step|update)|a step\b|all (gpus|processes|ranks|devices)"
    r"|(divided|split|shared) (by|among|between|over|across) (the |all )?(number of )?"
    r"(gpus|processes|ranks|devices|world)"
)
_OF_MACHINE = re.compile(
    r"machine|\b(of|per|on|for|in) (the |a |each |one )?(node|host)\b|all (processes|gpus|ranks)"
    r"|in all\b|together|\btotal"
)
_OF_ONE = re.compile(
    r"\bper[ _-](gpu|device|process|rank|worker|card)|\b(each|every|one|single|a) (gpu|device|process|rank|card)\b"
    r"|\blocal\b|multiplied|\btimes\b"
)


def _split_batches(program: Program) -> bool:
    return any(each.arg == "split_batches" for call in program.calls for each in call.keywords)
