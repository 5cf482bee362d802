"""Which files a program reads back to train on, and whether it is its own run that goes on by them."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.ddp import is_ddp
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import given, optimizers
from lockstep.commands.lint.rules.states import path_of, restored, stored
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk

_SAYS_SO = re.compile(r"resum|restart|continu")
_MAY_SAY = re.compile(r"checkpoint|ckpt|snapshot|last|restore")
_EVALUATES = re.compile(r"eval|test|valid|predict|infer|export|score")
_BESIDE = re.compile(
    r"['\"]\w*(epoch|step|iter|optim|sched|scaler|best|rng)\w*['\"]|['\"](opt|it|amp)['\"]", re.IGNORECASE
)


@remembered
def resumes(program: Program) -> bool:
    """Whether weights are loaded from a file to train on: by a name that says so, or because the run wrote it."""
    for call in program.named.get("load_state_dict", []):
        read = [made for arg in call.args for made in _read(program, arg)]
        if not read or all(_handed_over(program, each) for each in read) or _of_another(program, call):
            continue
        near = _around(program, call, read)
        if _SAYS_SO.search(near):
            return True
        if _MAY_SAY.search(near) and any(_whole_state(program, each) for each in read):
            return True
        if any(_own_file(program, each) and _early(program, each) for each in read):
            return True
    return False


def _read(program: Program, node: ast.AST) -> list[ast.Call]:
    """The calls that read a file whose state a value comes from, or what the value is a part of."""
    files, found = restored(program), list[ast.Call]()

    def note(each: ast.AST) -> bool:
        if each in files:
            found.append(files[each].call)
        return False

    depends(program, node, note)
    return found


def _around(program: Program, call: ast.Call, files: list[ast.Call]) -> str:
    """The conditions above a place and above the calls that lead to it, their functions' names, the files, as text."""
    texts = [text_of(each) for each in files]
    for _, each in _ways(program, call):
        source = program.owner[each]
        texts += [text_of(outer.test) for outer in above(source, each) if isinstance(outer, ast.If)]
        home = function_of(source, each)
        texts.append(home.name if home is not None and each is call else "")
    for each in files:
        path = path_of(program, each)
        texts += [text_of(made) for made in (origins(program, path) if path is not None else [])]
    return " ".join(texts).lower()


def _of_another(program: Program, call: ast.Call) -> bool:
    """Whether the network is surely none that the program trains: a teacher, or one to compare with."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    made = origins(program, owner) if owner is not None else []
    trained = _trained(program)
    known = bool(made) and all(isinstance(each, ast.Call) and last_name(each.func) != "getattr" for each in made)
    handed = {one for each in made if isinstance(each, ast.Call) for arg in each.args for one in origins(program, arg)}
    return known and bool(trained) and not trained & {*made, *handed}  # unwrap_model(model) is the model


@remembered
def _trained(program: Program) -> set[ast.AST]:
    """What made the networks whose parameters optimizers are given, and these; nothing if one is unknown."""
    found = set[ast.AST]()
    for optimizer in optimizers(program):
        first = given(program, optimizer, "params", 0)
        owners = [
            made
            for part in (origins(program, first) if first is not None else [])
            for each in walk(part)
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr in ("parameters", "named_parameters")
            for made in origins(program, each.func.value)
        ]
        if not owners or not all(isinstance(each, ast.Call) for each in owners):
            return set()
        found |= {optimizer, *owners}
        waiting = list(owners)
        while waiting:
            each = waiting.pop()
            if isinstance(each, ast.Call) and is_ddp(program, each) and each.args:
                inner = [one for one in origins(program, each.args[0]) if one not in found]
                found.update(inner)
                waiting += inner
    return found


def _whole_state(program: Program, load: ast.Call) -> bool:
    """Whether more than weights is read from a file, or the program writes it; no published network."""
    if _own_file(program, load):
        return True
    source = program.owner[load]
    for each in source.of(ast.Subscript, ast.Call):
        entry = None
        if isinstance(each, ast.Subscript):
            entry = each.slice
        elif isinstance(each, ast.Call) and last_name(each.func) in ("get", "pop") and each.args:
            entry = each.args[0]
        if entry is not None and _BESIDE.fullmatch(text_of(entry)) and load in files_of_state(program, each):
            return True
    return False


def _own_file(program: Program, load: ast.Call) -> bool:
    """Whether a file is read that the program writes."""
    path = path_of(program, load)
    if path is not None and depends(program, path, _looks_for_files) and stored(program):
        return True  # the newest of those that are there
    mine = {ast.dump(each) for each in origins(program, path)} if path is not None else set()
    written = [each.path for each in stored(program) if each.path is not None] + list(_renamed_to(program))
    return any(mine & {ast.dump(one) for one in origins(program, each)} for each in written)


def _looks_for_files(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in ("glob", "iglob", "rglob", "listdir", "scandir")


def _renamed_to(program: Program) -> Iterator[ast.expr]:
    """Where a file is moved that was written under another name first."""
    for name in ("replace", "rename", "move"):
        for call in program.named.get(name, []):
            meaning = qualified(program, call.func)
            if meaning in ("os.replace", "os.rename", "shutil.move") and len(call.args) == 2:
                yield call.args[1]
            elif not meaning and len(call.args) == 1 and isinstance(call.func, ast.Attribute):
                yield call.args[0]  # Path.replace


def _early(program: Program, load: ast.Call) -> bool:
    """Whether a file is read before the loops over epochs begin, seen from a function that leads to both."""
    ways = [way for loop in epoch_loops(program) for way in _ways(program, loop)]
    for function, place in _ways(program, load):
        beside = [other for home, other in ways if home is function]
        first = all(place.lineno <= other.lineno and place not in walk(other) for other in beside)
        if beside and first and not _leaves(program, place):
            return True
    return False


def _ways(program: Program, node: ast.AST) -> list[tuple[Function | None, ast.expr | ast.stmt]]:
    """A place, and those of the calls that lead to it, with the functions that they stand in."""
    found, waiting = list[tuple[Function | None, ast.expr | ast.stmt]](), [node]
    while waiting and len(found) < 16:
        place = waiting.pop(0)
        function = function_of(program.owner[place], place)
        assert isinstance(place, ast.expr | ast.stmt)
        found.append((function, place))
        if function is not None and not _EVALUATES.search(function.name):
            waiting += [site.call for site in sites(program, function) if site.call not in walk(function)]
    return found


def _leaves(program: Program, place: ast.AST) -> bool:
    """Whether a place is in a branch that ends the function: `if args.evaluate: ...; return`."""
    return any(
        isinstance(outer, ast.If) and isinstance(outer.body[-1], ast.Return | ast.Raise)
        for outer in above(program.owner[place], place)
    )


def _handed_over(program: Program, load: ast.Call) -> bool:
    """Whether a file is read that its function has just written: rank 0's first weights, for the other ranks."""
    path = path_of(program, load)
    mine = function_of(program.owner[load], load)
    for each in stored(program):
        call, other = each.call, each.path
        here = function_of(program.owner[call], call) is mine and call.lineno < load.lineno
        if here and path is not None and other is not None and ast.dump(path) == ast.dump(other):
            return True
    return False


def files_of_state(program: Program, node: ast.AST) -> list[ast.AST]:
    """The origins of a value, or of what it is an entry of."""
    while True:
        match node:
            case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner, attr="get" | "pop")):
                node = inner
            case _:
                return origins(program, node)


@remembered
def epoch_loops(program: Program) -> list[Loop]:
    """The loops around those over training batches, each once."""
    return list(dict.fromkeys(outer for around in step_loops(program).values() for outer in around))


@remembered
def counted_loops(program: Program) -> list[Loop]:
    """The loops over epochs; where there are none, those that count steps and draw their batches themselves."""
    alone = [loop for loop, around in step_loops(program).items() if not around]
    counting = [
        each
        for each in alone
        if isinstance(each, ast.While)
        or "range" in {last_name(one.func) for one in walk(each.iter) if isinstance(one, ast.Call)}
    ]
    return epoch_loops(program) or counting


@remembered
def knows_the_file(program: Program, loop: Loop) -> bool:
    """Whether where a loop begins or ends comes from a file that is read."""
    files = restored(program)
    return any(depends(program, node, lambda each: each in files) for node in bounds(loop))


def bounds(loop: Loop) -> list[ast.expr]:
    """What says how long a loop goes on: what it runs over, its test, and under `while True` those of its breaks."""
    if not isinstance(loop, ast.While):
        return [loop.iter]
    ends = [each.test for each in walk(loop) if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Break)]
    return ends if isinstance(loop.test, ast.Constant) else [loop.test]
