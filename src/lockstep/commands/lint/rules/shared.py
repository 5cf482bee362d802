"""How a rank comes by its part of a set: by the passes of a loop, by a data set of its own, by a shared factory."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.instances import constant_of, resolve
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import evaluation_loops
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_rank, is_world, on_rank, on_world
from lockstep.commands.lint.roles import constant, evaluation_loaders, given, of_loader
from lockstep.commands.lint.rules.overlap import reads
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import walk
from lockstep.commands.lint.ways import within


def takes_its_share(program: Program, made: ast.Call) -> bool:
    """Whether a local data set or sampler is given the rank and the number of ranks, or counts by them itself."""
    owner = definition(program, made.func)
    if not isinstance(owner, ast.ClassDef) or constant(program, given(program, made, "distributed")) is False:
        return False
    order = method(program, owner, "__iter__")
    if method(program, owner, "__getitem__") is None:
        return order is not None and _counts_by_rank(owner)
    values = [*made.args, *(each.value for each in made.keywords)]
    plain = [each for each in values if isinstance(each, ast.Name | ast.Attribute | ast.Call)]
    given_both = any(is_rank(each) for each in plain) and any(is_world(each) for each in plain)
    return given_both or _counts_by_rank(owner)


def _counts_by_rank(owner: ast.ClassDef) -> bool:
    """range(rank, n, world), or numbers[rank::world], somewhere in a class that pads nothing."""
    for node in walk(owner):
        match node:
            case ast.Call(args=[first, _, step]) if last_name(node.func) in ("range", "arange", "islice"):
                if any(map(is_rank, walk(first))) and any(map(is_world, walk(step))):
                    return True
            case ast.Slice() if every_nth(node):
                return True
    return False


def every_nth(node: ast.AST) -> bool:
    """files[rank::world_size]: what a rank takes for itself."""
    return (
        isinstance(node, ast.Slice)
        and node.lower is not None
        and node.step is not None
        and any(is_rank(each) for each in walk(node.lower))
    )


def alive(
    program: Program, loop: Loop | ast.comprehension, loader: ast.Call, found: list[ast.Call], *names: str
) -> list[ast.Call]:
    """Of what may be a loader's arguments of these names: what is, once the calls that lead to a loop are followed.

    `make_loader(test_set, shard=False)` gives no sampler although another call of it does.
    """
    known_reads = reads(program, loop) if isinstance(loop, Loop) else []
    mine = [each.loader for each in known_reads if each.loader.node is loader]
    known = set[ast.AST]()
    for name in names if found else ():
        node = of_loader(program, loader, name)
        for read in mine:
            if node is None:
                continue
            made = [each.node for each in resolve(program, within(read, node))]
            plain = [each for each in made if isinstance(each, ast.Call | ast.Constant)]
            if len(plain) < len(made) or any(
                isinstance(each, ast.Call) and last_name(each.func) == "BatchSampler" for each in plain
            ):
                return found
            known.update(made)
    return [each for each in found if each in known] if mine else found


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
        if function is not None and function.name != "__init__" and any(map(_yields_its_own, walk(function))):
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
            yields = any(isinstance(each, ast.Yield) for part in body for each in walk(part))
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
