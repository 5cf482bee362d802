"""Whether what a loop adds up is put together over the ranks, wherever that is done."""

import ast

from lockstep.commands.lint.around import class_of, function_of, statement_of
from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import added_up, mentions, own_nodes, reduces, root_name, tainted
from lockstep.commands.lint.metric_objects import asked
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, remembered
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.told import read_outside
from lockstep.commands.lint.tree import walk, yields


@remembered
def is_reduced(program: Program, loop: Loop) -> bool:
    """Whether what a loop adds up is put together over the ranks: in the loop, after it, or by who called it."""
    if any(reduces(program, each) for each in inside(program, loop)):
        return True
    nodes = own_nodes(program, loop)
    names = tainted(nodes, added_up(loop))
    if any(_reduces_itself(program, each) for each in walk(loop)):
        return True
    asked_for = [each for each in nodes if mentions(each, names)] + asked(loop, nodes)
    if any(reduces(program, each) for each in asked_for):
        return True
    if any(_reduced_by_method(program, loop, name) for name in names if name.startswith("self.")):
        return True
    for attribute, known, around in read_outside(program, loop):
        calls = [each for each in around if isinstance(each, ast.Call) and reduces(program, each)]
        if any(mentions(each, known | {root_name(attribute)}) for each in calls):
            return True
    function = function_of(program.owner[loop], loop)
    if function is not None and yields(function):
        return any(_reduced_by_consumer(program, site.call) for site in sites(program, function))
    return function is not None and any(_reduced_by_caller(program, site.call) for site in sites(program, function))


def _reduced_by_method(program: Program, loop: Loop, name: str) -> bool:
    """Whether another method of the loop's class puts an attribute's values of all ranks together."""
    owner = class_of(program.owner[loop], loop)
    for each in owner.body if owner is not None else ():
        if isinstance(each, Function) and each is not function_of(program.owner[loop], loop):
            nodes = list(walk(each))
            names = tainted(nodes, {name})
            if any(reduces(program, node) and mentions(node, names) for node in nodes):
                return True
    return False


def _reduces_itself(program: Program, node: ast.AST) -> bool:
    """Whether a call is a method's of a local class that puts the ranks' values together."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    for made in origins(program, node.func.value) if node.func.attr in ("update", "add", "add_batch") else []:
        owner = definition(program, made.func) if isinstance(made, ast.Call) else None
        found = method(program, owner, node.func.attr) if isinstance(owner, ast.ClassDef) else None
        if found is not None and any(reduces(program, each) for each in walk(found)):
            return True
    return False


def _reduced_by_consumer(program: Program, call: ast.Call) -> bool:
    """Whether what comes of a generator's batches is put together by the loop that runs over it, or after it."""
    outer = statement_of(program.owner[call], call)
    nodes = own_nodes(program, call)
    if not isinstance(outer, ast.For):
        return _reduced_by_caller(program, call)
    names = tainted(nodes, added_up(outer) | {each.id for each in walk(outer.target) if isinstance(each, ast.Name)})
    return any(reduces(program, each) and mentions(each, names) for each in nodes)


def _reduced_by_caller(program: Program, call: ast.Call, depth: int = 0) -> bool:
    for node in own_nodes(program, call):
        if isinstance(node, ast.Call) and node is not call and reduces(program, node):
            parts = [*node.args, *(each.value for each in node.keywords)]
            if isinstance(node.func, ast.Attribute):
                parts.append(node.func.value)
            if any(depends(program, part, lambda each: each is call) for part in parts):
                return True
    function = function_of(program.owner[call], call)
    returned = function is not None and any(
        isinstance(each, ast.Return) and each.value and depends(program, each.value, lambda one: one is call)
        for each in walk(function)
    )
    if not returned or function is None or depth > 3:
        return False
    return any(_reduced_by_caller(program, site.call, depth + 1) for site in sites(program, function))
