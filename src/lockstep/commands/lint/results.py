"""What a local function gives back: its returns and yields."""

import ast

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.program import Program, remembered
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import walk


def yielded(program: Program, function: Function) -> list[ast.expr]:
    """What a generator yields one by one."""
    source = program.owner[function]
    found = [each for each in walk(function) if isinstance(each, ast.Yield) and each.value is not None]
    return [each.value for each in found if each.value is not None and function_of(source, each) is function]


@remembered
def returns(program: Program, function: Function) -> list[ast.expr | None]:
    """What a function returns, in the order of the text; its inner functions' returns are not its own."""
    source = program.owner[function]
    nodes = [each for each in walk(function) if isinstance(each, ast.Return)]
    return [each.value for each in nodes if function_of(source, each) is function]
