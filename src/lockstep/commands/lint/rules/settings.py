"""What a program sets in its environment, and texts that it puts together."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import given
from lockstep.commands.lint.tree import text_of, walk

UNKNOWN = "\0"  # the part of a text that can't be told
_NAMES = ("MASTER_PORT", "MASTER_ADDR")


def settings(program: Program) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Where MASTER_PORT or MASTER_ADDR is given a value that replaces the launcher's: place, name, value."""
    for source in program.sources:
        if not any(name in source.text for name in _NAMES):
            continue
        for node in source.of(ast.Assign, ast.AugAssign, ast.For, ast.Call):
            match node:
                case ast.Assign(targets=[ast.Subscript(value=owner, slice=ast.Constant(value=str(name)))], value=value):
                    if name in _NAMES and _environment(program, owner):
                        yield node, name, value
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                    for target, value in zip(targets, values, strict=False):
                        match target:
                            case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if name in _NAMES:
                                if _environment(program, owner):
                                    yield node, name, value
                case ast.AugAssign(target=owner, op=ast.BitOr(), value=ast.Dict() as entries):
                    if _environment(program, owner):
                        yield from ((node, name, value) for name, value in _pairs(entries))
                case ast.For(target=ast.Tuple(), iter=ast.Call(func=ast.Attribute(attr="items", value=entries))):
                    if _copies(program, node):
                        for made in origins(program, entries):
                            known = _pairs(made) if isinstance(made, ast.Dict) else []
                            yield from ((node, name, value) for name, value in known)
                case ast.For(target=ast.Tuple(), iter=ast.Tuple(elts=rows) | ast.List(elts=rows)):
                    yield from ((node, name, value) for name, value in _rows(rows) if _copies(program, node))
                case ast.Call() if qualified(program, node.func).startswith("subprocess."):
                    own = next((each.value for each in node.keywords if each.arg == "env"), None)
                    for made in origins(program, own) if own is not None else []:
                        known = _pairs(made) if isinstance(made, ast.Dict) else []
                        yield from ((value, name, value) for name, value in known)
                case ast.Call(func=ast.Attribute(attr="update", value=owner)) if _environment(program, owner):
                    for name in _NAMES:
                        told = given(program, node, name)
                        if told is not None:
                            yield node, name, told
                    for made in origins(program, node.args[0]) if node.args else []:
                        known = _pairs(made) if isinstance(made, ast.Dict) else []
                        yield from ((node, name, value) for name, value in known)


def _pairs(entries: ast.Dict) -> list[tuple[str, ast.expr]]:
    pairs = zip(entries.keys, entries.values, strict=True)
    return [(key.value, value) for key, value in pairs if isinstance(key, ast.Constant) and key.value in _NAMES]


def _rows(rows: list[ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """(("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500"))"""
    for row in rows:
        match row:
            case ast.Tuple(elts=[ast.Constant(value=str(name)), value]) if name in _NAMES:
                yield name, value


def _environment(program: Program, node: ast.expr) -> bool:
    return qualified(program, node) == "os.environ" or (
        isinstance(node, ast.Name) and any(qualified(program, each) == "os.environ" for each in origins(program, node))
    )


def _copies(program: Program, loop: ast.For) -> bool:
    """`os.environ[name] = value` for the pairs of a loop."""
    names = [each.id for each in walk(loop.target) if isinstance(each, ast.Name)]
    for each in loop.body:
        match each:
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=ast.Name(id=key))], value=value):
                if names[:1] == [key] and names[-1] in text_of(value) and _environment(program, owner):
                    return True
    return False


def written(program: Program, node: ast.AST, depth: int = 0) -> str:
    """A text as far as the program puts it together of what it knows; UNKNOWN stands for the rest."""
    made = origins(program, node) if depth < 8 else []
    if len(made) != 1:
        return UNKNOWN
    match made[0]:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(
                written(program, each.value if isinstance(each, ast.FormattedValue) else each, depth + 1)
                for each in parts
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return written(program, left, depth + 1) + written(program, right, depth + 1)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"{written(program, left, depth + 1)}/{written(program, right, depth + 1)}"
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod(), right=right):
            return _filled(program, r"%[sd]", text, right.elts if isinstance(right, ast.Tuple) else [right], depth)
        case ast.Call(func=ast.Attribute(attr="format", value=pattern), args=args, keywords=keywords):
            named = {each.arg: each.value for each in keywords}
            text = re.sub(
                r"\{([A-Za-z]\w*)\}", lambda m: _said(program, named.get(m[1]), depth), written(program, pattern)
            )
            return _filled(program, r"\{\d?\}", text, args, depth)
        case ast.Call() as call:
            return _called(program, call, depth)
    return UNKNOWN


def _said(program: Program, value: ast.expr | None, depth: int) -> str:
    return UNKNOWN if value is None else written(program, value, depth + 1)


def _filled(program: Program, mark: str, text: str, values: list[ast.expr], depth: int) -> str:
    told = iter([written(program, each, depth + 1) for each in values])
    return re.sub(mark, lambda _: next(told, UNKNOWN), text)


def _called(program: Program, call: ast.Call, depth: int) -> str:
    name = qualified(program, call.func)
    if name == "tempfile.gettempdir":
        return "/tmp"
    if name in ("str", "int", "pathlib.Path", "os.path.abspath", "os.path.join") and call.args:
        return "/".join(written(program, each, depth + 1) for each in call.args)
    if isinstance(call.func, ast.Attribute) and last_name(call.func) in ("as_posix", "resolve", "absolute"):
        return written(program, call.func.value, depth + 1)
    return UNKNOWN
