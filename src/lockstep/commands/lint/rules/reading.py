"""Rules about reading: downloads, batch sizes, workers and their seeds, what is done to the pixels."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.flow import option, own_nodes
from lockstep.commands.lint.guards import guarded, per_rank
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant, datasets, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.several import distributed, lightning
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.tree import text_of, walk

_DOWNLOAD = "download"
_WAITING = re.compile(r"barrier|wait|reduce|gather|broadcast|init_process_group|Parallel|prepare|join|spawn|sync")


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
    known = [each for each in _sets(program) if _asked(program, _asks(program, each))]
    first = [each for each in known if guarded(program, each)]
    if first:  # one rank goes first, somewhere
        yield from (
            Hit(each, "the others don't wait for the first one") for each in known if _too_early(program, each, first)
        )
        return
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


def _sets(program: Program) -> Iterator[ast.Call]:
    """The calls of torchvision's data sets, of local classes built on them, and of those taken from a table."""
    yield from datasets(program)
    for call in program.calls:
        if not any(each.arg == _DOWNLOAD for each in call.keywords):
            continue
        owner = definition(program, call.func)
        if isinstance(owner, ast.ClassDef):
            if any(_of_torchvision(program, base) for base in owner.bases):
                yield call
        elif owner is None and not qualified(program, call.func):
            made = origins(program, call.func)
            if any(_of_torchvision(program, each) or _from_module(program, each) for each in [call.func, *made]):
                yield call


def _of_torchvision(program: Program, node: ast.AST) -> bool:
    return qualified(program, node).startswith("torchvision.datasets.")


def _from_module(program: Program, node: ast.AST) -> bool:
    """getattr(datasets, name), and an entry of a table of data sets."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[module, *_]):
            return qualified(program, module) == "torchvision.datasets"
        case ast.Subscript(value=value):
            tables = [each for each in origins(program, value) if isinstance(each, ast.Dict)]
            return any(_of_torchvision(program, entry) for table in tables for entry in table.values)
    return False


def _asked(program: Program, node: ast.expr | None) -> bool:
    """True, an option that is true unless somebody says otherwise, or `not os.path.exists(...)`."""
    if node is None or constant(program, node) is True:
        return node is not None
    if isinstance(node, ast.Attribute):
        default = option(program, node.attr)[1]
        return isinstance(default, ast.Constant) and default.value is True
    made = origins(program, node)
    absent = [each.operand for each in made if isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not)]
    tests = [each for each in absent if isinstance(each, ast.Call)]
    return (
        bool(tests)
        and len(tests) == len(made)
        and all(last_name(e.func) in ("exists", "isdir", "is_dir") for e in tests)
    )


def _too_early(program: Program, call: ast.Call, first: list[ast.Call]) -> bool:
    """Whether all ranks download right behind the one that was to go first, in its own function."""
    source, nodes = program.owner[call], own_nodes(program, call)
    for other in first:
        if call in first or program.owner[other] is not source or other not in nodes or other.lineno >= call.lineno:
            continue
        if function_of(source, other) is not function_of(source, call):
            continue
        between = [each for each in nodes if isinstance(each, ast.Call) and other.lineno < each.lineno <= call.lineno]
        inner = [one for each in between if each is not call for one in inside(program, each)]
        if not any(isinstance(each, ast.Call) and _WAITING.search(last_name(each.func)) for each in inner):
            return True
    return False


def _asks(program: Program, call: ast.Call) -> ast.expr | None:
    """The argument `download`, by name or by place."""
    fifth = last_name(call.func) in ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100", "SVHN")
    return given(program, call, _DOWNLOAD, 4 if fifth else -1)


def _weights(program: Program) -> Iterator[Hit]:
    """Pretrained weights, fetched by each process of a script that lets no rank go first anywhere."""
    fetched = [each for each in program.calls if _pretrained(program, each)]
    names = ("get_state_dict", "load_state_dict_from_url", "main_process_first", "local_main_process_first")
    if any(guarded(program, each) for each in fetched) or any(program.named.get(name) for name in names):
        return
    for call in fetched if program.named.get("init_process_group") else []:
        if per_rank(program, call) and not _waits(program, call):
            yield Hit(call, "pretrained weights")


def _pretrained(program: Program, call: ast.Call) -> bool:
    weights, flag = given(program, call, "weights"), given(program, call, "pretrained")
    if (weights is None and flag is None) or not _of_models(program, call):
        return False
    made = [weights, *origins(program, weights)] if weights is not None else []
    named = any(re.search(r"\w_Weights\.\w|\bWeights\.", text_of(each)) for each in made)
    named = named or (weights is not None and isinstance(constant(program, weights), str))
    return named or constant(program, flag) is True


def _of_models(program: Program, call: ast.Call) -> bool:
    """torchvision's models by name, by get_model, by getattr or from the module's dictionary; torch.hub.load."""
    name = qualified(program, call.func)
    match call.func:
        case ast.Call(func=ast.Name(id="getattr"), args=[module, *_]):
            return qualified(program, module) == "torchvision.models"
        case ast.Subscript(value=ast.Attribute(value=module, attr="__dict__")):
            return qualified(program, module) == "torchvision.models"
    return name == "torch.hub.load" or bool(re.match(r"torchvision\.models\.(\w+\.)?[a-z]\w*$", name))


def _fetched(program: Program) -> Iterator[Hit]:
    """A file that each process fetches to one place."""
    for call in program.calls if program.named.get("init_process_group") else ():
        known = _fetches(program, call) and _run_here(program, call) and not guarded(program, call)
        if known and per_rank(program, call) and not _waits(program, call) and not _conditional(program, call):
            yield Hit(call)


def _run_here(program: Program, call: ast.Call) -> bool:
    """Whether a place is the started file's own, or stands in a function that the program calls."""
    function = function_of(program.owner[call], call)
    return program.owner[call] is program.root or (function is not None and bool(sites(program, function)))


def _fetches(program: Program, call: ast.Call) -> bool:
    """A call that writes what it fetches: urlretrieve, gdown, wget in a shell, requests beside an open file."""
    name, meaning = last_name(call.func), qualified(program, call.func)
    if name in ("urlretrieve", "download_url", "download_and_extract_archive", "download_url_to_file"):
        return definition(program, call.func) is None
    if meaning == "gdown.download":
        return True
    if meaning == "os.system" or meaning.startswith("subprocess."):
        texts = [each.value for part in call.args for each in walk(part) if isinstance(each, ast.Constant)]
        command = " ".join(map(str, texts))
        return bool(re.match(r"(wget|gdown)\b|curl\b.*( -\w*[oO]\b| --output| >)", command))
    if meaning == "requests.get":
        function = function_of(program.owner[call], call)
        inner = [each for each in walk(function) if isinstance(each, ast.Constant)] if function is not None else []
        return any(each.value == "wb" for each in inner)
    return False


def _conditional(program: Program, call: ast.Call) -> bool:
    tests = [each.test for each in above(program.owner[call], call) if isinstance(each, ast.If)]
    return any(not re.search("exists|is_?dir|is_?file|listdir|__name__", text_of(each)) for each in tests)


def _prepares(program: Program) -> bool:
    """Whether Lightning's prepare_data, which one process of a machine runs, does something."""
    found = program.methods.get("prepare_data", [])
    return any(isinstance(each, ast.Call) for one in found for each in walk(one))


def _waits(program: Program, call: ast.Call) -> bool:
    """A barrier under a rank's condition above the call: the other ranks wait there."""
    line = call.lineno
    source = program.owner[call]
    return any(
        program.owner[each] is source and each.lineno < line and guarded(program, each)
        for name in ("barrier", "wait_for_everyone")
        for each in program.named.get(name, [])
    )
