"""DistributedDataParallel by whatever name: imported under another, subclassed, or filled in by partial()."""

import ast
import re

from lockstep.commands.lint.calls import definition, lineage
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.tree import text_of

_NAME = ".DistributedDataParallel"


def is_ddp(program: Program, call: ast.Call) -> bool:
    """Whether a call is DistributedDataParallel's, by whatever name it was imported, or a local subclass's."""
    if qualified(program, call.func).endswith(_NAME):
        return True
    return isinstance(call.func, ast.Name) and (_filled(program, call.func) or _subclass(program, call.func))


def _subclass(program: Program, node: ast.Name) -> bool:
    owner = definition(program, node)
    bases = [each for one in lineage(program, owner) for each in one.bases] if isinstance(owner, ast.ClassDef) else []
    return any(qualified(program, each).endswith(_NAME) for each in bases)


def _filled(program: Program, node: ast.Name) -> bool:
    """`wrap = partial(DistributedDataParallel, device_ids=[rank])`"""
    for binding in bindings(program, node, node.id) if program.named.get("partial") else []:
        match binding.value:
            case ast.Call(func=function, args=[made, *_]) if last_name(function) == "partial":
                if qualified(program, made).endswith(_NAME):
                    return True
    return False


def is_wrapper(program: Program, made: ast.AST) -> bool:
    """Whether an object is what DistributedDataParallel made."""
    return isinstance(made, ast.Call) and is_ddp(program, made)


def asks_for_wrapper(test: ast.expr) -> bool:
    """`hasattr(model, "module")`, `isinstance(model, DDP)`: where it is false, there is no wrapper."""
    return isinstance(test, ast.Call) and bool(
        re.match(r"hasattr\(\w[\w.]*, 'module'\)|isinstance\(.*(DDP|DistributedDataParallel)", text_of(test))
    )
