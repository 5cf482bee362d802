"""Lengths that count the whole set by one process's batch size: N times the batches that each process takes."""

import ast

from lockstep.commands.lint.learning import made_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.parts import attribute_bindings
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_world
from lockstep.commands.lint.roles import of_loader, sharding, training_loaders
from lockstep.commands.lint.tree import text_of


def of_all_by_own_batch(program: Program, size: ast.expr) -> bool:
    """`epochs * len(dataset) // batch_size`, where a loader of this batch size shares the set out over the ranks."""
    nodes = made_of(program, size)
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
            others = set(nodes) - set(made_of(program, node.right))
            divided = any(is_world(each) or "accum" in last_name(each).lower() for each in others)
            if not divided and any(_taken_by(program, each, node.right) for each in made_of(program, node.left)):
                return True
    return False


def _taken_by(program: Program, length: ast.AST, batch: ast.expr) -> bool:
    """Whether a length is that of the set of a training loader that shares it out in batches of this size."""
    if not (isinstance(length, ast.Call) and last_name(length.func) == "len" and len(length.args) == 1):
        return False
    for loader in training_loaders(program):
        data, own = of_loader(program, loader, "dataset"), of_loader(program, loader, "batch_size")
        if data is None or own is None or not sharding(program, loader):
            continue
        asked = length.args[0]
        named = isinstance(asked, ast.Attribute) and asked.attr == "dataset" and loader in origins(program, asked.value)
        if (named or set(origins(program, asked)) & set(origins(program, data))) and _same(program, own, batch):
            return True
    return False


def _same(program: Program, one: ast.expr, other: ast.expr) -> bool:
    """Whether two expressions are one number: made in one place, or an option's value that nothing sets anew."""
    first, second = origins(program, one), origins(program, other)
    plain = all(isinstance(each, ast.Attribute | ast.Subscript) for each in (*first, *second))
    if plain and len(first) == len(second) == 1:
        text = text_of(first[0])
        anew = any(text in source.attributes for source in program.sources)
        named = attribute_bindings(program, last_name(first[0])) if isinstance(first[0], ast.Attribute) else []
        return text == text_of(second[0]) and not anew and not named
    return first == second
