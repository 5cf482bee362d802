"""Draws of orders and splits: what a data set comes from, and which of them are another on each rank."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.depends import entering
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import constant, given, spread
from lockstep.commands.lint.seeding import alike, by_rank
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import children, text_of, walk


def differs(program: Program, draw: ast.Call) -> bool:
    """Whether each rank draws something else at a place, as far as seeds tell."""
    generator = _generator(program, draw)
    if generator == "own":
        return True
    equal = alike(program, generator) if generator else None
    if equal is None:
        return False
    source = program.owner[draw]
    here = function_of(source, draw)
    later = [
        program.owner[each] is source and function_of(source, each) is here and each.lineno > draw.lineno
        for each in equal
    ]
    return all(later)


_DRAWS = ("permutation", "shuffle", "randperm", "sample", "multinomial", "random_split", "train_test_split")
_FOLDS = ("KFold", "StratifiedKFold", "ShuffleSplit", "StratifiedShuffleSplit", "GroupShuffleSplit")
_SKLEARN = "sklearn.model_selection."


def _generator(program: Program, call: ast.Call) -> str:
    """Where a draw of an order or a split takes its numbers: a library's generator, each rank's "own", or nowhere."""
    name, meaning = last_name(call.func), qualified(program, call.func)
    if name not in (*_DRAWS, *_FOLDS, "choice") or definition(program, call.func) is not None or spread(call):
        return ""
    if meaning.startswith(_SKLEARN):
        fold = name.endswith("KFold")
        if fold and constant(program, given(program, call, "shuffle", 1)) is not True:
            return ""
        whole = constant(program, given(program, call, "shuffle")) is False
        return "" if whole else _by_state(program, given(program, call, "random_state"))
    if name == "choice" and constant(program, given(program, call, "replace", 2)) is not False:
        return ""
    if meaning.startswith("torch.") and name in ("randperm", "multinomial", "random_split"):
        place = 2 if name == "random_split" else -1
        made = given(program, call, "generator", place)
        return "torch" if made is None or _is_none(made) else _of_generator(program, made)
    if meaning.startswith("numpy.random."):
        return "numpy"
    if meaning in ("random.shuffle", "random.sample"):
        return "random"
    if isinstance(call.func, ast.Attribute) and not meaning:
        frame = name == "sample" and any(each.arg == "frac" for each in call.keywords)
        return (
            _by_state(program, given(program, call, "random_state"))
            if frame
            else _of_generator(program, call.func.value)
        )
    return ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _by_state(program: Program, state: ast.expr | None) -> str:
    """random_state=: none takes numpy's generator."""
    if state is None or _is_none(state):
        return "numpy"
    return "own" if on_rank(program, state) else ""


_MADE = ("numpy.random.default_rng", "numpy.random.RandomState", "random.Random")


def _of_generator(program: Program, node: ast.expr) -> str:
    """A generator object: "own" where it is seeded by the rank, or by the machine's entropy."""
    if any(by_rank(program, each) for each in _seeded_later(program, node)):
        return "own"
    for made in origins(program, node):
        if not isinstance(made, ast.Call):
            return ""
        if last_name(made.func) == "manual_seed":  # torch.Generator().manual_seed(...)
            return "own" if by_rank(program, made) else ""
        if qualified(program, made.func) in _MADE and (not made.args or _is_none(made.args[0])):
            return "" if made.keywords else "own"
        if qualified(program, made.func) in _MADE:
            return "own" if on_rank(program, made.args[0]) else ""
    return ""


def _seeded_later(program: Program, node: ast.expr) -> list[ast.Call]:
    """`generator.manual_seed(...)` of a name, as a statement of the same function."""
    source, found = program.owner[node], []
    for call in program.named.get("manual_seed", []) if isinstance(node, ast.Name | ast.Attribute) else []:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        same = owner is not None and text_of(owner) == text_of(node) and program.owner[call] is source
        if same and function_of(source, call) is function_of(source, node) and call.lineno < node.lineno:
            found.append(call)
    return found


@remembered
def _shuffled(program: Program) -> dict[tuple[ast.AST, str], ast.Call]:
    """What is shuffled in place: (scope that binds the name, or class, name) -> the call."""
    found: dict[tuple[ast.AST, str], ast.Call] = {}
    for call in program.named.get("shuffle", []):
        target = call.args[0] if call.args else None
        place = _place(program, target) if target is not None else None
        if place is not None:
            found[place] = call
    return found


def _place(program: Program, node: ast.AST) -> tuple[ast.AST, str] | None:
    if isinstance(node, ast.Name):
        known = bindings(program, node, node.id)
        source = program.owner[node]
        return (source.scopes[known[0].node], node.id) if known and known[0].node in source.scopes else None
    return None


@remembered
def draws_in(program: Program, node: ast.AST) -> list[ast.Call]:
    """The draws of orders and splits that a data set, or its indices, come from; transforms' own are left out."""
    waiting, seen, found = [node], {node}, list[ast.Call]()
    while waiting and len(seen) < 600:
        each = waiting.pop()
        if isinstance(each, ast.Lambda):
            continue
        inner = [one for one in children(each) if not (isinstance(one, ast.keyword) and one.arg == "transform")]
        if isinstance(each, ast.Name | ast.Attribute | ast.Call):
            inner += entering(program, each)
        if isinstance(each, ast.Name) and (call := _shuffled(program).get(_place(program, each) or (each, ""))):
            found.append(call)
        if isinstance(each, ast.Call):
            inner += _set_up(program, each)
            if _generator(program, each):
                found.append(each)
        waiting += [one for one in inner if one not in seen]
        seen.update(inner)
    return list(dict.fromkeys(found))


def _set_up(program: Program, call: ast.Call) -> Iterator[ast.AST]:
    """The draws in the __init__ of a local data set."""
    made = callee(program, call)
    if isinstance(made, Function) and made.name == "__init__":
        for each in walk(made):
            if isinstance(each, ast.Call) and last_name(each.func) in _DRAWS:
                yield each
