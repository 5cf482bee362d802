"""Generators that workers get a copy of, or that are seeded alike on all ranks."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import constant, loaders, of_loader, sharding, training_loaders
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.several import distributed
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk

_RANDOM = re.compile(r"^Random|Augment|^AugMix$|Jitter|Cutout|Erasing|^MixUp$|^CutMix$")
_DRAWN = re.compile(r"^(numpy\.random|random)\.\w+$|^torch\.(rand|randn|randint|randperm|bernoulli|multinomial)$")
_PLAIN = ("int", "getattr", "parse_args", "parse_known_args", "ArgumentParser", "get_worker_info")
_MADE = ("default_rng", "RandomState", "Random")


def of_loaders(program: Program) -> Iterator[Hit]:
    """A loader's own generator, seeded alike on all ranks: the workers' seeds are drawn from it."""
    if not distributed(program) or not _random(program):
        return
    for loader in training_loaders(program):
        node = of_loader(program, loader, "generator")
        if node is None or not sharding(program, loader) or not _with_workers(program, loader):
            continue
        start = of_loader(program, loader, "worker_init_fn")
        if start is not None and any(on_rank(program, each) for each in _bodies(program, start)):
            continue
        for call in _seedings(program, node):
            made = [call.args[0], *origins(program, call.args[0])]
            unknown = any(opaque(program)(part) for each in made for part in walk(each))
            if not unknown and not on_rank(program, call.args[0]):
                yield Hit(call, "the generator that the workers' seeds are drawn from is the same on all ranks")


def _bodies(program: Program, node: ast.expr) -> Iterator[ast.AST]:
    for each in [node, *origins(program, node), definition(program, node)]:
        if each is not None:
            yield each


def _seedings(program: Program, node: ast.expr) -> Iterator[ast.Call]:
    """torch.Generator().manual_seed(seed), and generator.manual_seed(seed) after it is made."""
    for made in origins(program, node):
        if isinstance(made, ast.Call) and last_name(made.func) == "manual_seed" and made.args:
            yield made
        elif isinstance(made, ast.Call) and last_name(made.func) == "Generator":
            for call in program.named.get("manual_seed", []):
                owner = call.func.value if isinstance(call.func, ast.Attribute) else None
                if call.args and owner is not None and made in origins(program, owner):
                    yield call


@remembered
def _random(program: Program) -> bool:
    """Whether something in the program changes samples at random as they are read."""
    if any(_RANDOM.search(name) and name not in ("RandomSampler", "Random", "RandomState") for name in program.named):
        return True
    readers = [*program.methods.get("__getitem__", []), *program.methods.get("__call__", [])]
    return any(
        isinstance(each, ast.Call) and _DRAWN.search(qualified(program, each.func)) is not None
        for reader in readers
        for each in walk(reader)
    )


def _with_workers(program: Program, loader: ast.Call) -> bool:
    workers = of_loader(program, loader, "num_workers")
    return workers is not None and constant(program, workers) != 0


def copied(program: Program) -> Iterator[Hit]:
    """A data set's generator, made once in the main process: each worker goes on from a copy of it."""
    for loader in loaders(program):
        node = of_loader(program, loader, "dataset")
        if node is None or not _with_workers(program, loader) or of_loader(program, loader, "worker_init_fn"):
            continue
        for owner in _sets(program, node):
            if "get_worker_info" not in text_of(owner):
                yield from (Hit(each, "each worker has a copy of it") for each in _own_generators(program, owner))


def _sets(program: Program, node: ast.expr, depth: int = 0) -> Iterator[ast.ClassDef]:
    """The local classes of a data set, and of those that it is a part of."""
    for made in origins(program, node):
        owner = definition(program, made.func) if isinstance(made, ast.Call) else None
        if isinstance(owner, ast.ClassDef):
            yield owner
        inner = made.args if isinstance(made, ast.Call) and owner is None and depth < 4 else []
        for each in [one for arg in inner for one in (arg.elts if isinstance(arg, ast.List) else [arg])]:
            yield from _sets(program, each, depth + 1)


def _own_generators(program: Program, owner: ast.ClassDef) -> Iterator[ast.Call]:
    reader = next((each for each in owner.body if isinstance(each, Function) and each.name == "__getitem__"), None)
    for call in walk(reader) if reader is not None else []:
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        for made in made_by(program, call.func.value, *_MADE):
            home = program.owner[made]
            function = function_of(home, made)
            begun = function is None or (function.name == "__init__" and class_of(home, made) is owner)
            if begun and qualified(program, made.func).startswith(("numpy.random.", "random.")):
                yield made


def opaque(program: Program) -> Callable[[ast.AST], bool]:
    """A predicate: calls of what is not in the program, whose result could be anything."""

    def wanted(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call) and last_name(node.func) not in _PLAIN and definition(program, node.func) is None
        )

    return wanted
