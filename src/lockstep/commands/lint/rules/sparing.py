"""The rule about no_sync and the forward pass: whether both stand in it."""

import ast
import re
from collections.abc import Iterator
from typing import cast

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside, model_calls
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Binding, Function, Loop
from lockstep.commands.lint.tree import children, text_of, walk

_CONTEXTS = ("no_sync", "no_backward_sync")
_SMALL = {
    "len",
    "int",
    "float",
    "min",
    "max",
    "to",
    "scale",
    "backward",
    "mean",
    "sum",
    "detach",
    "item",
    "size",
    "range",
}
_LOSS = re.compile(r"crit|loss|objective|cross_entropy|nll|mse|bce")


@rule(
    "LS312",
    "no-sync-without-forward",
    "no_sync leaves out the forward pass",
    result="gradients are reduced in each pass nevertheless: no time is saved",
    why="DDP decides in forward whether the backward pass will reduce",
    mend="with model.no_sync():\n    loss = loss_fn(model(x), y)\n    loss.backward()",
)
def no_sync_without_forward(program: Program) -> Iterator[Hit]:
    """`with no_sync()` around a backward whose loss was computed outside; DDP's flag set after the forward."""
    yield from _flag_after_forward(program)
    told = set[ast.AST]()
    for place, outer, body in _contexts(program):
        within = {each for part in body for each in inside(program, part)}
        runs = [each for each in backwards(program) if each in within]
        if not runs or place in told or any(model_calls(program, part) for part in body):
            continue
        lexical = {each for part in body for each in walk(part)}
        found = [_Place(program, outer, lexical, within).of_loss(run) for run in runs]
        if all(each == "outside" for each in found):
            told.add(place)
            yield Hit(place)


def _contexts(program: Program) -> Iterator[tuple[ast.AST, ast.With | ast.AsyncWith, list[ast.stmt]]]:
    """The `with` statements that spare the reduction: where that is said, the statement, and what runs in it."""
    named = any(name in source.text for source in program.sources for name in (*_CONTEXTS, "accumulate"))
    for source in program.sources if named else []:
        for node in cast(list[ast.With | ast.AsyncWith], source.of(ast.With, ast.AsyncWith)):
            for item in node.items:
                call = _sparing(program, item.context_expr)
                if call is not None:
                    yield (call if call in set(walk(item.context_expr)) else item.context_expr), node, node.body
            for part in node.body:
                for entered in walk(part):
                    stacked = isinstance(entered, ast.Call) and last_name(entered.func) == "enter_context"
                    if (
                        stacked
                        and isinstance(entered, ast.Call)
                        and entered.args
                        and _sparing(program, entered.args[0])
                    ):
                        rest = [each for each in node.body if each.lineno > entered.lineno]
                        yield entered, node, rest


def _sparing(program: Program, node: ast.expr) -> ast.Call | None:
    """The no_sync() call in a context, by a name, or in the local function that makes it."""
    waiting: list[ast.AST] = [node, *(each for each in origins(program, node) if each is not node)]
    if isinstance(node, ast.Name):
        waiting += [each.value for each in bindings(program, node, node.id) if each.kind == "value" and each.value]
    if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Name):
        known = [each.value for each in bindings(program, node.func, node.func.id) if each.value is not None]
        named = [one for each in known for one in walk(each) if isinstance(one, ast.Attribute)]
        if any(each.attr in _CONTEXTS for each in named):  # context = model.no_sync if more else nullcontext
            return node
    for call in [each for each in walk(node) if isinstance(each, ast.Call)]:
        function = callee(program, call)
        if function is not None and function.name != "__init__" and not _runs_backward(program, function):
            waiting.append(function)
    for part in waiting:
        for each in walk(part):
            if isinstance(each, ast.Call) and _spares(program, each):
                return each
    return None


def _runs_backward(program: Program, function: Function) -> bool:
    """Whether a function runs a backward pass itself."""
    within = set(inside(program, function))
    return any(each in within for each in backwards(program))


def _spares(program: Program, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, call.func.value
    if name == "accumulate":
        return "accelerator" in text_of(owner).lower()
    made = [last_name(each.func) for each in origins(program, owner) if isinstance(each, ast.Call)]
    return name in _CONTEXTS and not {"FullyShardedDataParallel", "FSDP", "fully_shard"} & set(made)


class _Place:
    """Whether what a loss comes from ran in a context; `lexical`: its nodes, `within`: those of what it calls too."""

    def __init__(self, program: Program, outer: ast.AST, lexical: set[ast.AST], within: set[ast.AST]) -> None:
        self.program, self.outer, self.lexical, self.within = program, outer, lexical, within
        self.seen = set[ast.AST]()

    def of_loss(self, run: ast.Call) -> str:
        """`inside`, `outside`, or nothing where that can't be told."""
        parts: list[ast.expr] = [*run.args]
        if isinstance(run.func, ast.Attribute) and not run.args:
            parts.append(run.func.value)
        return self._of_all([self.of(each, 0) for each in parts])

    def _of_all(self, found: list[str]) -> str:
        return "inside" if "inside" in found else "outside" if "outside" in found else ""

    def of(self, node: ast.AST, depth: int) -> str:
        """Where an expression of a place in the context was computed."""
        if depth > 8 or node in self.seen:
            return ""
        self.seen.add(node)
        if isinstance(node, ast.Call):
            parts: list[ast.AST] = [*node.args, *(each.value for each in node.keywords)]
            if isinstance(node.func, ast.Attribute) and not qualified(self.program, node.func):
                parts.append(node.func.value)
            if not self._is_plain(node):
                return "inside"
            return self._of_all([self.of(each, depth + 1) for each in parts])
        if isinstance(node, ast.Name):
            known = reaching(self.program, node, bindings(self.program, node, node.id))
            return self._of_all([self._bound(each, node.id, depth) for each in known])
        if isinstance(node, ast.Attribute):
            known = self.program.owner[node].attributes.get(text_of(node), [])
            return self._of_all([self._bound(each, "", depth) for each in known])
        return self._of_all([self.of(each, depth + 1) for each in children(node)])

    def _is_plain(self, call: ast.Call) -> bool:
        """A loss function, or arithmetic: no forward pass."""
        name = last_name(call.func)
        if name in _SMALL or (not call.args and not call.keywords):
            return True
        made = [last_name(each.func) for each in origins(self.program, call.func) if isinstance(each, ast.Call)]
        named = bool(_LOSS.search(name.lower())) and callee(self.program, call) is None
        return named or any(each.endswith("Loss") for each in made)

    def _bound(self, binding: Binding, name: str, depth: int) -> str:
        if binding.node in self.within and binding.kind != "param":
            return self.of(binding.value, depth + 1) if binding.value is not None else ""
        if binding.kind == "param":
            function = self.program.owner[binding.node].scopes[binding.node]
            if not isinstance(function, Function):
                return ""
            calls = [site for site in sites(self.program, function) if site.call in self.within]
            given = [value for site in calls if (value := argument(site, name)) is not None]
            if given:
                return self._of_all([self.of(each, depth + 1) for each in given])
            lexical = self.outer in set(walk(function))
            return "outside" if lexical and name in ("loss", "losses", "total_loss") else ""
        if binding.kind != "value" or binding.value is None:
            return ""
        calls_made = [each for each in walk(binding.value) if isinstance(each, ast.Call)]
        return "outside" if any(self._computes(each) for each in calls_made) else ""

    def _computes(self, call: ast.Call) -> bool:
        """A loss, or a call that may run the model."""
        name = last_name(call.func)
        small = name in _SMALL or qualified(self.program, call.func).startswith(("torch.utils", "torch.tensor"))
        return bool(call.args or call.keywords) and not small and not name.endswith(("Loss", "DataLoader"))


def _flag_after_forward(program: Program) -> Iterator[Hit]:
    """require_backward_grad_sync set between a forward and its backward, where the forward has already read it."""
    for source in program.sources:
        for text, known in source.attributes.items():
            for binding in known if text.endswith(".require_backward_grad_sync") else []:
                name, place = text.rpartition(".")[0], binding.node
                loop = next((each for each in above(source, place) if isinstance(each, Loop)), None)
                nodes = [each for each in walk(loop) if isinstance(each, ast.Call)] if loop is not None else []
                forwards = [each.lineno for each in nodes if text_of(each.func) == name]
                ends = [each.lineno for each in nodes if each in backwards(program)]
                line = getattr(place, "lineno", 0)
                if forwards and ends and max(forwards) < line < min(ends):
                    yield Hit(place)
