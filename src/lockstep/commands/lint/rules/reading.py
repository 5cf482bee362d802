"""Rules about reading: downloads, batch sizes, workers and their seeds, what is done to the pixels."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, sites
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import guarded, on_rank, on_world, per_rank
from lockstep.commands.lint.roles import (
    constant,
    datasets,
    distributed,
    given,
    lightning,
    loaders,
    of_loader,
    samplers,
    sharding,
)
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.source import above, class_of, function_of

_DOWNLOAD = "download"


@rule(
    "LS108",
    "every-rank-downloads",
    "every rank downloads the data",
    result="N processes fetch and write the same files at once: N times the traffic, and of a data set broken "
    "archives, or one that is read while it is unpacked",
    why="the line runs in each process, and nothing lets one of them go first",
    mend="if rank == 0:\n    MNIST(root, download=True)\ndist.barrier()\ndataset = MNIST(root, download=False)",
)
def every_rank_downloads(program: Program) -> Iterator[Hit]:
    """download=True where all ranks come by."""
    if not distributed(program):
        return
    yield from _weights(program)
    yield from _fetched(program)
    known = [each for each in datasets(program) if constant(program, given(program, each, _DOWNLOAD)) is True]
    if any(guarded(program, each) for each in known):
        return  # one rank goes first, somewhere
    for call in known:
        function = function_of(program.owner[call], call)
        if function is not None and function.name in ("prepare_data", "prepare"):
            continue
        if (
            function is not None
            and function.name != "main"
            and not sites(program, function)
            and not class_of(program.owner[call], call)
        ):
            continue  # nobody calls it
        if per_rank(program, call) and not _waits(program, call) and not (lightning(program) and _prepares(program)):
            yield Hit(call)


def _weights(program: Program) -> Iterator[Hit]:
    """torchvision's pretrained weights, fetched by each process of a script that lets no rank go first anywhere."""
    fetched = [each for each in program.calls if _pretrained(program, each)]
    names = ("get_state_dict", "load_state_dict_from_url", "main_process_first", "local_main_process_first")
    if any(guarded(program, each) for each in fetched) or any(program.named.get(name) for name in names):
        return
    for call in fetched if program.named.get("init_process_group") else []:
        if per_rank(program, call) and not _waits(program, call):
            yield Hit(call, "pretrained weights")


def _pretrained(program: Program, call: ast.Call) -> bool:
    if not re.match(r"torchvision\.models\.(\w+\.)?[a-z]\w*$", qualified(program, call.func)):
        return False
    weights, flag = given(program, call, "weights"), given(program, call, "pretrained")
    named = weights is not None and "Weights." in ast.unparse(weights)
    named = named or isinstance(constant(program, weights), str)
    return named or constant(program, flag) is True


def _fetched(program: Program) -> Iterator[Hit]:
    """A file that each process fetches to one place."""
    names = ("urlretrieve", "download_url", "download_and_extract_archive", "download_url_to_file")
    for name in names if program.named.get("init_process_group") else ():
        for call in program.named.get(name, []):
            here = program.owner[call] is program.root and definition(program, call.func) is None
            known = here and not guarded(program, call)
            if known and per_rank(program, call) and not _waits(program, call) and not _conditional(program, call):
                yield Hit(call)


def _conditional(program: Program, call: ast.Call) -> bool:
    tests = [each.test for each in above(program.owner[call], call) if isinstance(each, ast.If)]
    return any("exists" not in ast.unparse(each) and "__name__" not in ast.unparse(each) for each in tests)


def _prepares(program: Program) -> bool:
    return bool(program.methods.get("prepare_data"))


def _waits(program: Program, call: ast.Call) -> bool:
    """A barrier under a rank's condition above the call: the other ranks wait there."""
    line = call.lineno
    source = program.owner[call]
    return any(
        program.owner[each] is source and each.lineno < line and guarded(program, each)
        for name in ("barrier", "wait_for_everyone")
        for each in program.named.get(name, [])
    )


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
    for loader in loaders(program):
        batch = of_loader(program, loader, "batch_size")
        shared = sharding(program, loader) or prepared(program, loader) or lightning(program)
        if (
            batch is not None
            and shared
            and meant_for_all(program, batch)
            and not on_world(program, batch)
            and not _split_batches(program)
        ):
            yield Hit(batch, f"batch_size={ast.unparse(batch)}")
        yield from _of_own_sampler(program, loader)
        workers = of_loader(program, loader, "num_workers")
        if (
            workers is not None
            and (depends(program, workers, _counts_cores) or (_workers_of_all(program, workers) and shared))
            and not depends(program, workers, _caps)
            and not on_world(program, workers)
        ):
            yield Hit(workers, f"num_workers={ast.unparse(workers)}")


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
    """Whether an option's help says that the number of workers is that of the machine, or of all processes."""
    told = option(program, last_name(workers))[0].lower() if isinstance(workers, ast.Name | ast.Attribute) else ""
    return bool(re.search(r"machine|\bnode\b|all (processes|gpus|ranks)|in all\b|together|\btotal", told)) and not (
        re.search(r"per[ _-](process|gpu|rank)|each (process|gpu|rank)", told)
    )


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
        name = last_name(each).lower()
        if not name:
            return False
        if re.search(r"(global|total|effective|overall|whole).*(batch|bs)|batch.*(global|total)", name):
            return True
        told = option(program, name)[0].lower()
        if re.search(r"per[ _-](gpu|device|process|rank)|each (gpu|device|process)", told):
            return False
        return bool(re.search(r"^(batch(_?size)?|bs|images_per_step)$", name)) and bool(_ALL.search(told))

    return depends(program, node, says)


_ALL = re.compile(
    r"(total|global|overall|whole)\b|(across|over|of|on|for) all\b|in all\b|together|(per|of an?|of one|of each) "
    r"(optimizer |optimiser )?(step|update)|a step\b"
)


def _split_batches(program: Program) -> bool:
    return any(each.arg == "split_batches" for call in program.calls for each in call.keywords)
