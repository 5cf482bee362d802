"""Values told so that equal keys are equal things: which data set, which numbers of it."""

import ast
import re

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.instances import resolve
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.tree import text_of, walk
from lockstep.commands.lint.ways import Made, within

_DRAWS = re.compile(
    r"rand|permut|shuffle|sample|choice|split$|normal$|uniform|bootstrap"
    r"|^(next|pop|popleft|popitem|input|read|readline|recv|get_nowait)$"  # another each time as well
)
Key = tuple[object, ...]


def key(program: Program, one: Made, depth: int = 0) -> Key | None:
    """What a value is, told so that equal keys are equal things; None where more than one may be meant."""
    found = resolve(program, one)
    if len(found) != 1 or depth > 14:
        return None
    made = found[0]
    match made.node:
        case ast.Constant(value=value):
            return ("constant", value)
        case ast.Call(func=function, args=args, keywords=keywords):
            return call_key(program, made, function, args, keywords, depth)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return _of_parts(program, made, ("tuple",), parts, [], depth)
        case ast.JoinedStr(values=parts):
            return _of_parts(program, made, ("text",), parts, [], depth)
        case ast.FormattedValue(value=value):
            return key(program, within(made, value), depth + 1)
        case ast.BinOp(left=left, op=op, right=right):
            return _of_parts(program, made, ("operation", type(op).__name__), [left, right], [], depth)
        case ast.Subscript(value=value, slice=index):
            return _of_parts(program, made, ("entry",), [value, index], [], depth)
        case ast.Slice(lower=lower, upper=upper, step=step):
            parts = [ast.Constant(None) if each is None else each for each in (lower, upper, step)]
            return _of_parts(program, made, ("slice",), parts, [], depth)
        case ast.UnaryOp(op=op, operand=inner):
            return _of_parts(program, made, ("operation", type(op).__name__), [inner], [], depth)
        case ast.Attribute(value=value, attr=attr):
            base = key(program, within(made, value), depth + 1)
            return None if base is None else ("attribute", base, attr)
        case ast.Name(id=name) if (item := _item(program, made.node)) is not None:
            return item
        case ast.Name(id=name):
            return ("name", qualified(program, made.node) or name)
        case ast.Import() | ast.ImportFrom() if made.trail and isinstance(made.trail[-1], ast.Name):
            return ("name", qualified(program, made.trail[-1]))  # sys of sys.argv[1]
        case ast.arg() | ast.ClassDef():
            return ("itself", made.node)
    return None


def call_key(
    program: Program, made: Made, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword], depth: int = 0
) -> Key | None:
    """The key of a call with these of its arguments."""
    return _of_parts(program, made, ("call", _named(program, made, function, depth)), args, keywords, depth)


def _named(program: Program, made: Made, function: ast.expr, depth: int) -> object:
    local = definition(program, function) if function in program.owner else None
    inner = [each for each in walk(local) if isinstance(each, ast.Call)] if local is not None else []
    if _DRAWS.search(last_name(function)) or any(map(_draws, inner)):
        return made.node  # drawn anew by each call
    meaning = qualified(program, function) if function in program.owner else ""
    if meaning or not isinstance(function, ast.Attribute):
        return meaning or text_of(function)
    base = key(program, within(made, function.value), depth + 1)
    return None if base is None else (base, function.attr)


def _draws(call: ast.Call) -> bool:
    """Whether a call may draw at random; `path.split("/")` and transforms.RandomCrop(32) draw nothing here."""
    name = last_name(call.func)
    of_text = name == "split" and (not call.args or isinstance(call.args[0], ast.Constant))
    return bool(_DRAWS.search(name)) and not of_text and not re.match(r"Random[A-Z]", name)


def _of_parts(
    program: Program, made: Made, head: Key, parts: list[ast.expr], keywords: list[ast.keyword], depth: int
) -> Key | None:
    if any(isinstance(each, ast.Starred) for each in parts) or any(each.arg is None for each in keywords):
        return None
    keys = [key(program, within(made, each), depth + 1) for each in parts]
    named = [(each.arg, key(program, within(made, each.value), depth + 1)) for each in keywords]
    if None in keys or None in head or any(each is None for _, each in named):
        return None
    return (*head, *keys, *sorted(named, key=lambda pair: str(pair[0])))


def _item(program: Program, node: ast.Name) -> Key | None:
    """A name that one loop gives a value in each pass, such as the folds of a cross-validation: by its place there."""
    found = bindings(program, node, node.id) if node in program.owner else []
    return ("item", found[0].node, *found[0].path) if len(found) == 1 and found[0].kind == "item" else None
