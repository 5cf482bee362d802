"""A path as text, to tell whether two places write and read one file."""

import ast

from lockstep.commands.lint.instances import resolve
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.tree import text_of
from lockstep.commands.lint.ways import Made, within

_DEPTH = 6  # names and calls followed
_JOINING = ("join", "joinpath", "with_suffix", "with_name", "Path")


def spelling(program: Program, one: Made, depth: int = 0) -> str:
    """A path as text: names by what they hold, and what has no text by its place in the program."""

    def part(node: ast.AST) -> str:
        return spelling(program, within(one, node), depth)

    match one.node:
        case ast.Constant(value=value):
            return repr(value)
        case ast.Name() | ast.Attribute() as node:
            made = resolve(program, one)
            if len(made) == 1 and made[0].node is not node and depth < _DEPTH:
                return spelling(program, made[0], depth + 1)
            if isinstance(node, ast.Attribute):
                return text_of(node)
            return "@" + ",".join(sorted(str(id(each.node)) for each in made))
        case ast.Call(func=ast.Name(id="open" | "str" | "Path"), args=[first, *_]):
            return part(first)
        case ast.Call(func=ast.Attribute(value=owner, attr="open"), args=_) as node if not qualified(
            program, node.func
        ):
            return part(owner)
        case ast.BinOp(left=left, right=right, op=ast.Div() | ast.Add()):
            return "/".join(part(each) for each in (left, right))
        case ast.Call(args=args) as node if last_name(node.func) in _JOINING:
            whole = [*([node.func.value] if not qualified(program, node.func) else []), *args]  # type: ignore[attr-defined]
            return "/".join(part(each) for each in whole)
        case ast.Call() as node if depth < _DEPTH:
            made = [each for each in resolve(program, one) if each.node is not node]
            return spelling(program, made[0], depth + 1) if len(made) == 1 else f"@{id(node)}"
        case ast.JoinedStr(values=values):
            inner = [each.value if isinstance(each, ast.FormattedValue) else each for each in values]
            return "+".join(part(each) for each in inner)
        case ast.Subscript() as node:
            return text_of(node)
    return f"@{id(one.node)}"
