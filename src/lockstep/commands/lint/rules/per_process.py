"""The rule about numbers of one process that are given those meant for all: batch sizes, loader workers."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.ranks import is_world, on_rank, on_world
from lockstep.commands.lint.roles import given, loaders, of_loader, samplers, sharding, training_loaders
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.several import distributed, lightning
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk


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
        batch = of_loader(program, loader, "batch_size") or _of_batches(program, loader)
        shared = sharding(program, loader) or prepared(program, loader) or lightning(program)
        if (
            batch is not None
            and shared
            and meant_for_all(program, batch)
            and not on_world(program, batch)
            and not depends(program, batch, _divides)
            and not _split_batches(program)
        ):
            yield Hit(batch, f"batch_size={text_of(batch)}")
        elif batch is not None and shared and not _split_batches(program) and _raised(program, loader, batch):
            yield Hit(batch, f"batch_size={text_of(batch)}, which is that of all processes")
        yield from _of_own_sampler(program, loader)
        workers = of_loader(program, loader, "num_workers")
        if (
            workers is not None
            and (depends(program, workers, _counts_cores) or (_workers_of_all(program, workers) and shared))
            and not depends(program, workers, lambda each: _caps(each) or _divides(each))
            and not on_world(program, workers)
        ):
            place = (program.owner[workers].scopes[workers], text_of(workers))
            if place not in told:  # once for all loaders of a function
                yield Hit(workers, f"num_workers={text_of(workers)}")
            told.add(place)


def _of_batches(program: Program, loader: ast.Call) -> ast.expr | None:
    """The size that torch's BatchSampler is given."""
    made = [each for each in samplers(program, loader) if last_name(each.func) == "BatchSampler"]
    known = [each for each in made if definition(program, each.func) is None]
    return given(program, known[0], "batch_size", 1) if known else None


def _raised(program: Program, loader: ast.Call, batch: ast.expr) -> bool:
    """`per_process * world_size` as the batch of a training loader that is one process's."""
    made = origins(program, batch)
    products = [each for each in made if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult)]
    if not products or len(products) < len(made) or loader not in training_loaders(program):
        return False
    return all(any(map(_counts_processes, (each.left, each.right))) for each in products)


def _counts_processes(node: ast.AST) -> bool:
    named = not isinstance(node, ast.Call | ast.Name | ast.Attribute) or re.search(
        r"world|^size$|num_(processes|replicas)", last_name(node.func if isinstance(node, ast.Call) else node).lower()
    )
    return bool(named) and is_world(node)


def _of_own_sampler(program: Program, loader: ast.Call) -> Iterator[Hit]:
    """A local batch sampler that is given the whole batch beside the rank, and divides it nowhere."""
    for sampler in samplers(program, loader):
        owner = definition(program, sampler.func)
        if not isinstance(owner, ast.ClassDef) or not any(on_rank(program, each) for each in sampler.args):
            continue
        divides = [each for each in walk(owner) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.FloorDiv)]
        if any("batch" in text_of(each.left) for each in divides):
            continue
        for each in [*sampler.args, *(one.value for one in sampler.keywords)]:
            if (
                isinstance(each, ast.Name | ast.Attribute)
                and meant_for_all(program, each)
                and not on_world(program, each)
            ):
                yield Hit(each, f"{text_of(each)} of {text_of(sampler.func)}")


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
    return not isinstance(node.right, ast.Constant) and "accum" not in text_of(node.right).lower()


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
        if not _BATCH.search(name):
            return False
        told = f"{option(program, name)[0]} {comment(program, each)} {_documented(program, each)}".lower()
        above = _above(program, each).lower()
        told = f"{told} {above}" if _OF_BATCHES.search(above) else told
        told = re.sub(r"\b(not|instead of|rather than) (the one )?(per|of one|for one)[ -]\w+", "", told)
        return bool(_ALL.search(told)) and not _OF_ONE.search(told)

    return depends(program, node, says)


def _documented(program: Program, node: ast.AST) -> str:
    """What the docstring of a parameter's function says of it, in its own line."""
    found = bindings(program, node, node.id) if isinstance(node, ast.Name) else []
    function = program.owner[node].scopes[found[0].node] if found and found[0].kind == "param" else None
    text = (ast.get_docstring(function) or "") if isinstance(function, Function) else ""
    lines = [each for each in text.splitlines() if re.match(rf"\W*{last_name(node)}\b.{{0,20}}[:-]", each)]
    return " ".join(lines)


def _above(program: Program, node: ast.AST) -> str:
    """A comment that has the line above the one that gives a name its value."""
    found = bindings(program, node, node.id) if isinstance(node, ast.Name) else []
    source = program.owner[node] if found else None
    lines = [each.node.lineno - 2 for each in found if isinstance(each.node, ast.stmt)]
    texts = [source.lines[line].strip() for line in lines if source is not None and line >= 0]
    return " ".join(text for text in texts if text.startswith("#"))


def called(node: ast.AST) -> str:
    """A value's name: a variable's, an attribute's, or that of an entry."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value.lower()
    return last_name(node).lower()


def comment(program: Program, node: ast.AST) -> str:
    """What stands behind the line that gives a name its value: a constant's, a field's, a class's attribute's, an
    entry's."""
    name = last_name(node)
    if isinstance(node, ast.Subscript) and called(node):
        made = [(program.owner.get(each), each) for each in origins(program, node.value) if isinstance(each, ast.Dict)]
        places = [
            (source, v.lineno)
            for source, each in made
            for k, v in zip(each.keys, each.values, strict=True)
            if isinstance(k, ast.Constant) and k.value == called(node) and source is not None
        ]
        return " ".join(source.lines[line - 1].partition("#")[2] for source, line in places if source is not None)
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


_BATCH = re.compile(
    r"^((train|mini|step)_?)?(batch(_?size)?|bs)$|^(images|samples|pictures|examples)_(per|in|a)(_a|_one)?_?(step|update)$"
)
_OF_BATCHES = re.compile(
    r"\b(total|global|effective|overall|whole) (mini.?)?batch"
    r"|batch.*(over|across|of|for) all (gpus|processes|ranks|devices)"
)
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
