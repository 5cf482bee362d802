"""What a number counts: epochs, batches of one, processes, samples, by the names and lengths that it is made of."""

import ast
import re
from dataclasses import dataclass

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import LOADERS, step_loops
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.ranks import is_world
from lockstep.commands.lint.roles import SHARDING, loaders, of_loader

_PER_EPOCH = re.compile(
    r"(step|iter|iteration|batche?|update)s?_?(per|in|each|an|of)_?(an_)?epoch|^(n|num|nb|number_of)_?batches$|^batches$"
    r"|^(epoch|loader)_(len|length|size|steps)$|^nb$|^estimated_stepping_batches$"
)
_EPOCHS = re.compile(r"epochs?$|^epochs?_|_epochs?_")
_BATCHES = re.compile(r"step|iter|batch|update|t_total|total|max_t$")
_SIZE = re.compile(r"(^|_)(batch_?size|bs|bsz|batch|minibatch|micro_?batch)(_size)?$")
_ACCUMULATED = re.compile(r"accum|grad_acc")
_SAME = ("int", "float", "round", "ceil", "floor", "max", "min", "abs", "sum")


@dataclass(frozen=True)
class Unit:
    """The powers of what a number is a product of; `vague`: it may hold batches as well, which the text doesn't say."""

    epochs: int = 0
    batches: int = 0
    world: int = 0
    samples: int = 0
    accumulated: int = 0
    vague: bool = False

    def times(self, other: "Unit", sign: int = 1) -> "Unit":
        """The unit of a product, or (-1) of a quotient."""
        return Unit(
            self.epochs + sign * other.epochs,
            self.batches + sign * other.batches,
            self.world + sign * other.world,
            self.samples + sign * other.samples,
            self.accumulated + sign * other.accumulated,
            self.vague or other.vague,
        )

    def joined(self, other: "Unit") -> "Unit":
        """The unit of a sum: a plain number takes the other's."""
        return Unit(
            max(self.epochs, other.epochs, key=abs),
            max(self.batches, other.batches, key=abs),
            max(self.world, other.world, key=abs),
            max(self.samples, other.samples, key=abs),
            max(self.accumulated, other.accumulated, key=abs),
            self.vague or other.vague,
        )

    @property
    def of_batches(self) -> bool:
        """A number of batches or of samples, of one epoch or more."""
        return self.batches >= 1 or self.samples >= 1

    @property
    def of_epochs(self) -> bool:
        """A number of epochs, and surely not of batches."""
        return self.epochs >= 1 and self.batches == 0 and self.samples == 0 and not self.vague


def unit(program: Program, node: ast.AST, depth: int = 0) -> Unit:
    """What a value counts, as far as the text says."""
    if depth > 8:
        return Unit(vague=True)
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            one, other = unit(program, left, depth + 1), unit(program, right, depth + 1)
            if isinstance(op, ast.Mult):
                return one.times(other)
            if isinstance(op, ast.Div | ast.FloorDiv):
                return one.times(other, -1)
            return _added(one, left, other, right)
        case ast.UnaryOp(operand=inner):
            return unit(program, inner, depth + 1)
        case ast.IfExp(body=body, orelse=other):
            return unit(program, body, depth + 1).joined(unit(program, other, depth + 1))
        case ast.Constant():
            return Unit()
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return _sum(program, parts, depth)
        case ast.ListComp(elt=part):
            return unit(program, part, depth + 1)
        case ast.Call():
            return _of_call(program, node, depth)
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return _of_name(program, node, depth)
    return Unit(vague=True)


def _added(one: Unit, left: ast.expr, other: Unit, right: ast.expr) -> Unit:
    """The unit of `a + b` or `a - b`, which count the same: a name that doesn't say what takes the other's."""
    for known, unsaid, node in ((one, other, right), (other, one, left)):
        named = name_of(node).lower()
        if unsaid == Unit(vague=True) and named and not _BATCHES.search(named) and known.of_epochs:
            return known
    return one.joined(other)


def _sum(program: Program, parts: list[ast.expr], depth: int) -> Unit:
    found = Unit()
    for part in parts:
        found = found.joined(unit(program, part, depth + 1))
    return found


def _of_call(program: Program, call: ast.Call, depth: int) -> Unit:
    name = last_name(call.func)
    if name == "len" and len(call.args) == 1:
        return _length(program, call.args[0])
    if name in _SAME and call.args:
        return _sum(program, call.args, depth)
    if is_world(call) and not call.args:
        return Unit(world=1)
    if callee(program, call) is not None:
        made = [each for each in origins(program, call) if each is not call]
        if made:
            return _sum(program, [each for each in made if isinstance(each, ast.expr)], depth)
    named = name_of(call)
    return by_name(named) if named else Unit(vague=True)


def _length(program: Program, node: ast.expr) -> Unit:
    if is_loader(program, node):
        return Unit(batches=1)
    made = origins(program, node)
    if any(isinstance(each, ast.Call) and last_name(each.func) in SHARDING for each in made):
        return Unit(samples=1, world=-1)  # a sampler's: those of one process
    named = re.search(r"(data)?set$|^data$|samples|images|_ds$|^ds$|sampler$", last_name(node).lower())
    return Unit(samples=1) if named or sets(program).intersection(made) else Unit(vague=True)


@remembered
def sets(program: Program) -> frozenset[ast.AST]:
    """The data sets that loaders are given, by the calls that made them."""
    given = [of_loader(program, each, "dataset") for each in loaders(program)]
    made = [one for each in given if each is not None for one in origins(program, each)]
    return frozenset(each for each in made if isinstance(each, ast.Call))


def is_loader(program: Program, node: ast.expr) -> bool:
    """Whether a value is a loader, by what made it, or by its name where that can't be told."""
    made = origins(program, node)
    if any(isinstance(each, ast.Call) and last_name(each.func) in LOADERS for each in made):
        return True
    unknown = not any(isinstance(each, ast.Call | ast.List | ast.Tuple | ast.Dict | ast.Constant) for each in made)
    return unknown and bool(re.search(r"loader|_dl$|^dl$|^dl_|batches$|dataloader", last_name(node).lower()))


def name_of(node: ast.AST) -> str:
    """`epochs` of args.epochs, cfg["epochs"], cfg.get("epochs", 90), getattr(args, "epochs")."""
    match node:
        case ast.Subscript(slice=ast.Constant(value=str(text))):
            return text
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(text)), *_]):
            return text
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(text)), *_]):
            return text
        case ast.Name() | ast.Attribute():
            return last_name(node)
    return ""


def by_name(text: str) -> Unit:
    """What a number counts by its name alone."""
    name = text.lower()
    if _ACCUMULATED.search(name):
        return Unit(accumulated=1)
    if _PER_EPOCH.search(name):
        return Unit(batches=1)
    if _SIZE.search(name):
        return Unit(samples=1, batches=-1)
    if re.search(r"epochs?$", name) or (_EPOCHS.search(name) and not _BATCHES.search(name.replace("epoch", ""))):
        return Unit(epochs=1)
    return Unit(vague=True)


def _of_name(program: Program, node: ast.Name | ast.Attribute | ast.Subscript, depth: int) -> Unit:
    if not isinstance(node, ast.Subscript) and is_world(node):
        return Unit(world=1)
    named = by_name(name_of(node))
    if named.accumulated:
        return named
    if named.vague and ast.dump(node) in epoch_counts(program):
        named = Unit(epochs=1)
    made = [each for each in origins(program, node) if each is not node]
    known = [each for each in made if isinstance(each, ast.BinOp | ast.IfExp | ast.Call | ast.UnaryOp | ast.ListComp)]
    if known:
        found = _sum(program, list[ast.expr](known), depth)
        return named if found.vague and not named.vague else found
    parts = [part for each in made if isinstance(each, ast.List | ast.Tuple) for part in each.elts]
    if parts:
        return _sum(program, parts, depth)
    items = [each.iter for each in made if isinstance(each, ast.comprehension | ast.For)]
    if items and len(items) == len(made) and named.vague:
        return _sum(program, items, depth)
    plain = bool(made) and all(isinstance(each, ast.Constant) for each in made)
    return Unit() if plain and named.vague and not _BATCHES.search(name_of(node).lower()) else named


@remembered
def epoch_counts(program: Program) -> frozenset[str]:
    """What the loops around the loops over batches count to, as ast.dump writes it: N of `range(N)`, `epoch < N`."""
    found = set()
    for around in step_loops(program).values():
        for loop in around:
            last = last_of(loop)
            if last is not None and not isinstance(last, ast.Constant):
                found.add(ast.dump(last))
    return frozenset(found)


def last_of(loop: ast.AST) -> ast.expr | None:
    """N of `for epoch in range(N)`, and of `while epoch < N`."""
    match loop:
        case ast.For(iter=ast.Call(func=function, args=arguments)) if arguments:
            if last_name(function) in ("range", "trange"):
                return arguments[min(1, len(arguments) - 1)]
            if isinstance(arguments[0], ast.Call) and last_name(arguments[0].func) == "range":
                inner = arguments[0].args
                return inner[min(1, len(inner) - 1)] if inner else None  # tqdm(range(N))
        case ast.While(test=ast.Compare(ops=[ast.Lt() | ast.LtE()], comparators=[last])):
            return last
    return None
