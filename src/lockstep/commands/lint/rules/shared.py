"""How a rank comes by its part of a set: by the passes of a loop, by a data set of its own, by a shared factory."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.instances import constant_of, resolve
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import evaluation_loops
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_rank, is_world, on_rank, on_world
from lockstep.commands.lint.roles import evaluation_loaders, given, of_loader
from lockstep.commands.lint.rules.overlap import reads
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.ways import within


def takes_its_share(program: Program, made: ast.Call) -> bool:
    """Whether a local data set is given the rank and the number of ranks."""
    owner = definition(program, made.func)
    if not isinstance(owner, ast.ClassDef) or method(program, owner, "__getitem__") is None:
        return False
    values = [*made.args, *(each.value for each in made.keywords)]
    plain = [each for each in values if isinstance(each, ast.Name | ast.Attribute | ast.Call)]
    return any(is_rank(each) for each in plain) and any(is_world(each) for each in plain)


def by_passes(program: Program, loop: Loop) -> bool:
    """Whether a rank leaves out the passes of the others: `if i % world != rank: continue`, islice by rank."""
    if any(_leaves_out(program, each) for each in loop.body):
        return True
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return False
    for call in [each for each in [loop.iter, *origins(program, loop.iter)] if isinstance(each, ast.Call)]:
        if last_name(call.func) == "islice" and len(call.args) == 4 and on_rank(program, call.args[1]):
            return True
        function = callee(program, call)
        if function is not None and function.name != "__init__" and any(map(_yields_its_own, ast.walk(function))):
            return True
    return False


def _leaves_out(program: Program, node: ast.stmt) -> bool:
    """if number % world != rank: continue."""
    if not (isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Continue)):
        return False
    match node.test:
        case ast.Compare(left=ast.BinOp(op=ast.Mod(), right=world), ops=[ast.NotEq()], comparators=[rank]):
            return on_world(program, world) and on_rank(program, rank)
    return False


def _yields_its_own(node: ast.AST) -> bool:
    """if number % world == rank: yield batch."""
    match node:
        case ast.If(
            test=ast.Compare(left=ast.BinOp(op=ast.Mod(), right=world), ops=[ast.Eq()], comparators=[rank]), body=body
        ):
            yields = any(isinstance(each, ast.Yield) for part in body for each in ast.walk(part))
            return yields and is_world(world) and is_rank(rank)
    return False


def from_factories(program: Program) -> Iterator[tuple[ast.Call, Loop]]:
    """The padding samplers of evaluation loops whose loader is made by the line that makes the training loader."""
    apart = evaluation_loaders(program)
    seen = set[ast.AST]()
    for loop in evaluation_loops(program):
        for read in reads(program, loop):
            call = read.loader.node
            if not isinstance(call, ast.Call) or call in apart or read.trains:
                continue
            node = of_loader(program, call, "sampler")
            for made in resolve(program, within(read.loader, node)) if node is not None else ():
                sampler = made.node
                if not (isinstance(sampler, ast.Call) and last_name(sampler.func) == "DistributedSampler"):
                    continue
                dropped = given(program, sampler, "drop_last", 5)
                whole = dropped is None or constant_of(program, within(made, dropped)) is False
                if whole and sampler not in seen:
                    seen.add(sampler)
                    yield sampler, loop
