"""Which files a program reads back to train on, and whether it is its own run that goes on by them."""

import ast
import re

from lockstep.commands.lint.calls import sites
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import is_ddp, origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.roles import given, optimizers
from lockstep.commands.lint.rules.saving import loads, saves
from lockstep.commands.lint.source import Loop, above, function_of

_SAYS_SO = re.compile(r"resum|restart|continu")
_MAY_SAY = re.compile(r"checkpoint|ckpt|snapshot|last|restore")
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
    """The calls of torch.load whose file a value comes from, or what the value is a part of."""
    files, found = set(loads(program)), list[ast.Call]()

    def note(each: ast.AST) -> bool:
        if each in files and isinstance(each, ast.Call):
            found.append(each)
        return False

    depends(program, node, note)
    return found


def _around(program: Program, call: ast.Call, files: list[ast.Call]) -> str:
    """The conditions above a place and above the calls that lead to it, their functions' names, the files, as text."""
    function = function_of(program.owner[call], call)
    known = [site.call for site in sites(program, function)] if function is not None else []
    texts = [ast.unparse(each) for each in files]
    for each in [call, *known]:
        source = program.owner[each]
        texts += [ast.unparse(outer.test) for outer in above(source, each) if isinstance(outer, ast.If)]
        home = function_of(source, each)
        texts.append(home.name if home is not None and each is call else "")
    for each in files:
        path = given(program, each, "f", 0)
        texts += [ast.unparse(made) for made in (origins(program, path) if path is not None else [])]
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
            for each in ast.walk(part)
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
    for each in source.nodes:
        entry = None
        if isinstance(each, ast.Subscript):
            entry = each.slice
        elif isinstance(each, ast.Call) and last_name(each.func) in ("get", "pop") and each.args:
            entry = each.args[0]
        if entry is not None and _BESIDE.fullmatch(ast.unparse(entry)) and load in files_of_state(program, each):
            return True
    return False


def _own_file(program: Program, load: ast.Call) -> bool:
    """Whether a file is read that the program writes."""
    path = given(program, load, "f", 0)
    mine = {ast.dump(each) for each in origins(program, path)} if path is not None else set()
    written = [each for save in saves(program) if (each := given(program, save, "f", 1)) is not None]
    return any(mine & {ast.dump(one) for one in origins(program, each)} for each in written)


def _early(program: Program, load: ast.Call) -> bool:
    """Whether a file is read above the loops over epochs, in their function, or by a function called there."""
    outer = [loop for around in step_loops(program).values() for loop in around]
    function = function_of(program.owner[load], load)
    places = [load, *([site.call for site in sites(program, function)] if function is not None else [])]
    return any(
        program.owner[place] is program.owner[loop]
        and function_of(program.owner[place], place) is function_of(program.owner[loop], loop)
        and place.lineno <= loop.lineno
        for place in places
        for loop in outer
    )


def _handed_over(program: Program, load: ast.Call) -> bool:
    """Whether a file is read that its function has just written: rank 0's first weights, for the other ranks."""
    path = given(program, load, "f", 0)
    mine = function_of(program.owner[load], load)
    for call in saves(program):
        other = given(program, call, "f", 1)
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
        or "range" in {last_name(one.func) for one in ast.walk(each.iter) if isinstance(one, ast.Call)}
    ]
    return epoch_loops(program) or counting


@remembered
def knows_the_file(program: Program, loop: Loop) -> bool:
    """Whether where a loop begins or ends comes from a file that is read."""
    node = loop.test if isinstance(loop, ast.While) else loop.iter
    files = set(loads(program))
    return depends(program, node, lambda each: each in files)
