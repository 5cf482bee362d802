"""The rule about workers' seeds: what worker_init_fn, a loader's generator and a data set's own make of them."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of
from lockstep.commands.lint.calls import callee, definition, instance_of, method
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import loaders, of_loader
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.generators import copied, of_loaders, opaque
from lockstep.commands.lint.several import distributed
from lockstep.commands.lint.sites import default
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS110",
    "worker-seeds-equal",
    "the loader's workers have equal seeds",
    result="samples that different workers prepare get the same random augmentation, in each epoch again",
    why="worker_init_fn sets the same seed in each worker, or the same on each rank",
    mend="def seed_worker(worker_id):\n    seed = torch.initial_seed() % 2**32  # differs by worker and epoch\n"
    "    np.random.seed(seed)\n    random.seed(seed)",
)
def worker_seeds_equal(program: Program) -> Iterator[Hit]:
    """A worker_init_fn whose seed knows no worker; in a distributed program, one that knows no rank."""
    several = distributed(program)
    for loader in loaders(program):
        node = of_loader(program, loader, "worker_init_fn")
        for function, first in _started(program, node) if node is not None else []:
            alike = several and not (node is not None and _filled_by_rank(program, node))
            for call in walk(function):
                seed = _seed_of(program, call) if isinstance(call, ast.Call) else None
                if seed is not None and not _seed_differs(program, seed, _worker(function, first), alike):
                    yield Hit(call)
                    break
    yield from of_loaders(program)
    yield from copied(program)


def _filled_by_rank(program: Program, node: ast.expr) -> bool:
    """partial(init, seed=7 + rank)."""
    made = [each for each in origins(program, node) if isinstance(each, ast.Call) and last_name(each.func) == "partial"]
    values = [one for each in made for one in [*each.args[1:], *(key.value for key in each.keywords)]]
    return any(on_rank(program, each) for each in values)


def _started(program: Program, node: ast.expr) -> Iterator[tuple[Function | ast.Lambda, int]]:
    """The local functions that may be worker_init_fn, and how many of their parameters partial() has filled."""
    made: list[tuple[ast.AST | None, int]] = [
        (each, 0) for each in [*origins(program, node), definition(program, node)]
    ]
    for each, _ in list(made):
        if isinstance(each, ast.Call) and last_name(each.func) == "partial" and each.args:
            made += [(one, len(each.args) - 1) for one in origins(program, each.args[0])]
        own = class_of(program.owner[each], each) if isinstance(each, ast.Attribute) else None
        if own is not None and isinstance(each, ast.Attribute) and text_of(each.value) == "self":
            made.append((method(program, own, each.attr), 0))
        owner = instance_of(program, each) if each is not None else None
        if owner is not None:
            made.append((method(program, owner, "__call__"), 0))
    for function, first in dict.fromkeys(made):
        if isinstance(function, Function | ast.Lambda):
            yield function, first


def _worker(function: Function | ast.Lambda, first: int) -> str:
    """The parameter that is the worker's number."""
    named = [each.arg for each in function.args.args if each.arg != "self"]
    return named[first] if first < len(named) else ""


def _seed_of(program: Program, call: ast.Call) -> ast.expr | None:
    """What a call seeds a generator of the process with: numpy's, Python's, torch's, or all by a local function."""
    local, name = callee(program, call), last_name(call.func)
    if local is None:
        return call.args[0] if name in ("seed", "manual_seed", *_ALL) and call.args else None
    if not any(isinstance(each, ast.Call) and last_name(each.func) in _SEEDS for each in walk(local)):
        return None
    first = local.args.args[0].arg if local.args.args else ""
    given = call.args[0] if call.args else next((each.value for each in call.keywords if each.arg == first), None)
    return given if given is not None else default(local, first)


_SEEDS = ("seed", "manual_seed")
_ALL = ("seed_all", "seed_everything", "set_seed", "set_random_seed", "manual_seed_all")


def _seed_differs(program: Program, seed: ast.expr, worker: str, several: bool) -> bool:
    def drawn(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "seed":
            return bool(made_by(program, node.value, "get_worker_info"))
        named = isinstance(node, ast.Call) and last_name(node.func) in ("initial_seed", "get_state", "urandom")
        return named or last_name(node) in ("seed_seq", "base_seed", "entropy")

    def numbered(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "id":
            return bool(made_by(program, node.value, "get_worker_info"))
        return isinstance(node, ast.Name) and node.id == worker

    if depends(program, seed, drawn):
        return True
    by_worker = depends(program, seed, numbered)
    return by_worker and (not several or on_rank(program, seed) or depends(program, seed, opaque(program)))
