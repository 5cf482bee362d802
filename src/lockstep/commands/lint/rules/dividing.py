"""Whether a loss is divided on its way from the samples to backward()."""

import ast
import re

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee, definition, instance_of, method
from lockstep.commands.lint.flow import root_name
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import constant
from lockstep.commands.lint.rules.units import by_name, name_of
from lockstep.commands.lint.source import Binding, Function
from lockstep.commands.lint.tree import text_of, walk

_THROUGH = {"mean", "sum", "float", "double", "clone", "to", "scale", "scale_loss", "stack", "add", "view", "squeeze"}
_DIVIDERS = re.compile(
    r"^_foreach_(div|mul)|^register_(comm_)?hook|^register_post|(scale|divide|average|multiply|normali[sz]e)_?\w*grad"
)
_LIBRARIES = ("torch", "timm", "transformers", "lightning", "pytorch_lightning", "accelerate", "monai", "fastai")
_DIVISION = {"div", "div_", "true_divide", "divide"}


def divided(program: Program, node: ast.AST, batch: frozenset[str], every: ast.expr | None = None) -> bool:
    """Whether a loss is divided by more than the size of its own batch, or is a sum that nobody made a mean of.

    `batch`: the names of a pass's samples; `every`: the number of passes, where there is one.
    """
    return _Way(program, batch, constant(program, every)).divided(node, 0, False)


class _Way:
    """What is asked along the way; `seen` ends circles."""

    def __init__(self, program: Program, batch: frozenset[str], every: object) -> None:
        self.program, self.batch, self.every = program, batch, every
        self.seen = set[ast.AST]()

    def divided(self, node: ast.AST, depth: int, summed: bool) -> bool:
        if depth > 12 or node in self.seen:
            return False
        self.seen.add(node)
        match node:
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._by(right) or self.divided(left, depth + 1, summed)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                if any(self._fraction(each) or _of_samples(each) for each in (left, right)):
                    return True
                named = not summed and bool(re.search(r"scale|weight|inv|frac|ratio", text_of(node)))
                return named or any(self.divided(each, depth + 1, summed) for each in (left, right))
            case ast.BinOp(left=left, right=right):
                return any(self.divided(each, depth + 1, True) for each in (left, right))
            case ast.IfExp(body=body, orelse=other):
                return any(self.divided(each, depth + 1, summed) for each in (body, other))
            case ast.NamedExpr(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self.divided(value, depth + 1, summed)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return any(self.divided(each, depth + 1, True) for each in parts)
            case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part):
                return self.divided(part, depth + 1, True)
            case ast.Call():
                return self._call(node, depth, summed)
            case ast.Name(id=name):
                return any(self._bound(each, depth, summed) for each in bindings(self.program, node, name))
            case ast.Attribute():
                known = self.program.owner[node].attributes.get(text_of(node), [])
                return any(self._bound(each, depth, summed) for each in known)
            case ast.Subscript(value=value):
                return self.divided(value, depth + 1, summed)
            case ast.Dict(values=parts):
                return any(self.divided(each, depth + 1, True) for each in parts)
        return False

    def _by(self, right: ast.expr) -> bool:
        """Whether a divisor is no size of the pass's own batch, and no constant beside another k."""
        sizes = [right, *(each for each in origins(self.program, right) if each is not right)]
        for node in sizes:
            inner = node.args[0] if isinstance(node, ast.Call) and node.args else node
            text = text_of(node) if isinstance(node, ast.expr) else ""
            if re.search(r"len\(|\.size\(|\.shape|numel\(", text) and root_name(_bare(inner)) in self.batch:
                return False
        number = constant(self.program, right)
        return not (isinstance(number, int) and isinstance(self.every, int) and number != self.every)

    def _fraction(self, node: ast.expr) -> bool:
        """1 / k, by itself or by a name."""
        made = [node, *origins(self.program, node)]
        return any(
            isinstance(each, ast.BinOp)
            and isinstance(each.op, ast.Div)
            and isinstance(each.left, ast.Constant)
            and self._by(each.right)
            for each in made
        )

    def _bound(self, binding: Binding, depth: int, summed: bool) -> bool:
        value = binding.value
        match binding.kind:
            case "aug" if isinstance(binding.node, ast.AugAssign) and value is not None:
                if isinstance(binding.node.op, ast.Div):
                    return isinstance(value, ast.expr) and self._by(value)
                if isinstance(binding.node.op, ast.Mult):
                    fraction = isinstance(value, ast.expr) and self._fraction(value)
                    return fraction or bool(re.search(r"scale|weight|inv|frac|ratio", text_of(binding.node)))
                return self.divided(value, depth + 1, True)
            case "value" | "with" if value is not None:
                return self.divided(value, depth + 1, summed)
            case "param":
                made = [
                    each for each in origins(self.program, _read(self.program, binding)) if each is not binding.node
                ]
                return any(self.divided(each, depth + 1, summed) for each in made)
        return False

    def _call(self, call: ast.Call, depth: int, summed: bool) -> bool:
        name = last_name(call.func)
        if name in _DIVISION and isinstance(call.func, ast.Attribute):
            by = call.args[-1:] if call.args else [each.value for each in call.keywords]
            return any(self._by(each) for each in by) or self.divided(call.func.value, depth + 1, summed)
        if self._sums(call) or self._is_unseen(call):
            return True
        lambdas = [each for each in origins(self.program, call.func) if isinstance(each, ast.Lambda)]
        if any(self.divided(each.body, depth + 1, summed) for each in lambdas):
            return True
        function = callee(self.program, call)
        if function is not None and function.name == "__init__":
            function = None
        owner = instance_of(self.program, call.func) if function is None else None
        if owner is not None:
            function = method(self.program, owner, "forward") or method(self.program, owner, "__call__")
        if function is not None:
            parts = [each for each in returns(self.program, function) if each is not None]
            if any(self.divided(each, depth + 1, summed) for each in parts):
                return True
            return self._inner(function)
        parts = [*call.args, *(each.value for each in call.keywords)]
        if any(by_name(name_of(each)).accumulated for each in parts if isinstance(each, ast.Name | ast.Attribute)):
            return True  # whatever it makes of it
        if isinstance(call.func, ast.Attribute) and name in _THROUGH:
            parts = [*parts, call.func.value]
        if name in _THROUGH or name in ("sum", "backward"):
            return any(self.divided(each, depth + 1, summed) for each in parts)
        return False

    def _inner(self, function: Function) -> bool:
        """A function that is given the number of passes by its name, and divides somewhere."""
        names = {each for each in walk(function) if isinstance(each, ast.Name | ast.Attribute)}
        accumulated = any(by_name(last_name(each)).accumulated for each in names)
        return accumulated and any(isinstance(each, ast.Div) for each in walk(function))

    def _is_unseen(self, call: ast.Call) -> bool:
        """A loss of a module of the script's own that is not among the files, which may do anything."""
        made = [call, *(each for each in origins(self.program, call.func) if isinstance(each, ast.Call))]
        names = [qualified(self.program, each.func) for each in made if definition(self.program, each.func) is None]
        return any("." in each and not each.startswith(_LIBRARIES) and ".py" not in each for each in names)

    def _sums(self, call: ast.Call) -> bool:
        made = [call, *(each for each in origins(self.program, call.func) if isinstance(each, ast.Call))]
        return any(
            each.arg == "reduction" and constant(self.program, each.value) == "sum"
            for one in made
            for each in one.keywords
        )


def _of_samples(node: ast.expr) -> bool:
    """A batch's size: what a mean is made a sum with."""
    return by_name(name_of(node)).samples > 0 or bool(re.search(r"len\(|\.size\(0|\.shape\[0\]$", text_of(node)))


def _bare(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node


def _read(program: Program, binding: Binding) -> ast.AST:
    """A place in a function that reads its parameter; the parameter where none does."""
    function = program.owner[binding.node].scopes[binding.node]
    name = binding.node.arg if isinstance(binding.node, ast.arg) else ""
    found = [each for each in walk(function) if isinstance(each, ast.Name) and each.id == name]
    return found[0] if found else binding.node


def divided_in_place(program: Program, value: ast.AST) -> bool:
    """Whether a loss is divided by a statement of its own: `loss.div_(k)`."""
    names = {each.id for each in walk(value) if isinstance(each, ast.Name)}
    here = function_of(program.owner[value], value)
    for call in [call for name in ("div_", "mul_", "true_divide_") for call in program.named.get(name, [])]:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in names and function_of(program.owner[call], call) is here:
            return True
    return False


def gradients_divided(nodes: list[ast.AST]) -> bool:
    """Whether gradients themselves are divided, or a hook may do it."""
    for node in nodes:
        match node:
            case ast.AugAssign(target=target, op=ast.Div() | ast.Mult()) if _is_gradient(target):
                return True
            case ast.Assign(targets=[target], value=ast.BinOp(op=ast.Div() | ast.Mult())) if _is_gradient(target):
                return True
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if re.match(r"(true_)?(div|mul)", attr):
                if _is_gradient(value) or "grad" in text_of(value):
                    return True
            case ast.Call() if re.match(
                r"_foreach_(div|mul)|register_(comm_)?hook|register_post", last_name(node.func)
            ):
                return True
            case ast.Call() if re.search(
                r"(scale|divide|average|multiply|normali[sz]e)_?\w*grad", last_name(node.func)
            ):
                return True
    return False


def _is_gradient(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in walk(node)) or (
        isinstance(node, ast.Name) and node.id in ("grad", "g")
    )
