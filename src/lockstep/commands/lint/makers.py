"""Which of a library's calls a value comes from."""

import ast

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name


def made_by(program: Program, node: ast.AST, *names: str) -> list[ast.Call]:
    """The calls of a library's function or class of one of these names that a value comes from."""
    calls = [each for each in origins(program, node) if isinstance(each, ast.Call)]
    return [each for each in calls if last_name(each.func) in names and definition(program, each.func) is None]


def reduced(program: Program, node: ast.AST) -> bool:
    """Whether a value goes through, or into, a sum or gathering over the ranks."""
    return bool(
        made_by(program, node, "reduce", "gather", "gather_for_metrics", "all_gather", "all_reduce", "allreduce")
    )
