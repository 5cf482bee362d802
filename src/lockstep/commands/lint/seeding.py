"""Random generators: which are seeded, and whether with one number on all ranks."""

import ast
import re

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of

SEEDS = (
    "manual_seed",
    "manual_seed_all",
    "seed_everything",
    "set_seed",
    "seed_all",
    "set_random_seed",
    "set_determinism",
)
_OF_ONE = {"numpy.random.seed": "numpy", "random.seed": "random", "torch.seed": "torch"}
_TORCH = ("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "ignite.utils.manual_seed")
_ALL = ("torch", "numpy", "random")


def seeded_alike(program: Program) -> bool:
    """Whether torch's generator is seeded with one number on all ranks, or that can't be told."""
    return alike(program, "torch") != []


def torch_seeds(program: Program) -> list[ast.Call]:
    """The calls that seed torch's generator of this process."""
    calls = [call for name in SEEDS for call in program.named.get(name, [])]
    return [each for each in calls if last_name(each.func) != "manual_seed" or qualified(program, each.func) in _TORCH]


def seed_of(call: ast.Call) -> ast.expr | None:
    """The number that a call seeds with."""
    if call.args:
        return call.args[0]
    return next((each.value for each in call.keywords if each.arg in ("seed", "a")), None)


def by_rank(program: Program, call: ast.Call) -> bool:
    """Whether a call seeds with a number that is another on each rank: of the rank, of its device, or by chance."""
    seed = seed_of(call)
    return seed is not None and (on_rank(program, seed) or depends(program, seed, _own))


_OF_DEVICE = re.compile(
    r"^(local_)?(gpu|device)(_?(id|index|num|idx|no))?$|^current_device$|^proc(ess)?_?(id|idx|index)$"
)
_CHANCE = (
    "time.time",
    "time.time_ns",
    "os.urandom",
    "os.getpid",
    "secrets.randbits",
    "torch.seed",
)


def _own(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and text_of(node.func) in _CHANCE:
        return True
    return isinstance(node, ast.Name | ast.Attribute) and bool(_OF_DEVICE.search(last_name(node)))


def unequal(program: Program, node: ast.expr) -> bool:
    """Whether a number is the rank's, the clock's, or drawn from a generator that nothing seeds alike."""

    def drawn(each: ast.AST) -> bool:
        if not isinstance(each, ast.Call) or last_name(each.func) not in (
            "randint",
            "random",
            "randrange",
            "getrandbits",
        ):
            return False
        library = qualified(program, each.func).rpartition(".")[0].partition(".")[0]
        return library in _ALL and alike(program, library) == []

    chance = depends(program, node, lambda each: isinstance(each, ast.Call) and text_of(each.func) in _CHANCE)
    return on_rank(program, node) or chance or depends(program, node, drawn)


@remembered
def handed_on(program: Program) -> bool:
    """Whether a function that seeds is handed on, or kept under another name: `for seed in (random.seed, ...)`."""
    for source in program.sources:
        for node in source.of(ast.Attribute):
            if node.attr in ("seed", "manual_seed", "manual_seed_all"):
                parent = source.parents[node]
                called = isinstance(parent, ast.Call) and parent.func is node
                if not called and qualified(program, node) in (*_OF_ONE, *_TORCH):
                    return True
    return False


@remembered
def alike(program: Program, generator: str) -> list[ast.Call] | None:
    """The calls that seed a library's generator with one number on all ranks; None where that can't be told."""
    if handed_on(program):
        return None
    found = [each for each in torch_seeds(program) if generator == "torch" or "manual_seed" not in last_name(each.func)]
    found += [each for each in program.named.get("seed", []) if _OF_ONE.get(qualified(program, each.func)) == generator]
    for name, calls in program.named.items():
        other = "seed" in name.lower() and name not in (*SEEDS, "seed", "initial_seed", "get_seed")
        if other and any(callee(program, each) is None and definition(program, each.func) is None for each in calls):
            return None  # a library's function, which may seed anything
    own = [each for each in found if definition(program, each.func) is None]  # a local one's inner calls count
    return [each for each in own if seed_of(each) is not None and not by_rank(program, each)]


def used(program: Program, call: ast.Call) -> bool:
    """Whether something in the program reads the name of the function or class that a call stands in."""
    source = program.owner[call]
    outer = [each for each in above(source, call) if isinstance(each, Function | ast.ClassDef)]
    if not outer:
        return True
    return outer[-1].name in _read_names(program)


@remembered
def _read_names(program: Program) -> set[str]:
    return {last_name(node) for each in program.sources for node in each.of(ast.Name, ast.Attribute)}
