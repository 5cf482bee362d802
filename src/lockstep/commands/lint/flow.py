"""What becomes of the numbers that a loop adds up: whether they are reduced over the ranks, and where they are told."""

import ast
import re
from functools import cache

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.metric_objects import left_apart
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import children, text_of, walk, yields

_REDUCER = re.compile(
    r"reduce|gather|synchroni[sz]e|sync_between|metric_average|^compute$|^sync$|sync_dist|average_over|merge"
)
_TOLD = re.compile(
    r"^(print|log|info|add_scalar|add_scalars|log_metrics|write|log_metric|track|debug|warning|writerow|dump)$"
)
_ADDING = ("append", "update", "extend", "add", "add_batch", "index_add_", "index_put_", "scatter_add_")


def is_reduction(node: ast.AST) -> bool:
    """A call that puts values of all ranks together, by its name."""
    return isinstance(node, ast.Call) and _named_as_reduction(last_name(node.func))


@cache
def _named_as_reduction(name: str) -> bool:
    return bool(_REDUCER.search(name.lower()))


def reduces(program: Program, node: ast.AST) -> bool:
    """A call that puts values of all ranks together: by its name, or by what the local function runs at once."""
    if not isinstance(node, ast.Call):
        return False
    if is_reduction(node):
        return not left_apart(program, node)
    function = callee(program, node)
    if function is None and isinstance(node.func, ast.Attribute) and not is_telling(node):
        known = program.methods.get(node.func.attr, []) if not qualified(program, node.func) else []
        return any(_reduces_at_once(program, each) for each in known if each.name not in ("update", "__init__"))
    return function is not None and _reduces_at_once(program, function)


def _reduces_at_once(program: Program, function: Function) -> bool:
    """Whether a function puts the ranks' values together, and is no loop over batches or phase of training."""
    if function.name == "__init__" or yields(function):
        return False
    key = ("reduces", function)
    if key not in program.memo:
        program.memo[key] = False  # a circle adds nothing
        inner = [each for part in function.body for each in walk(part)]
        loops = any(isinstance(each, Loop) for each in inner)
        program.memo[key] = not loops and any(reduces(program, each) for each in inner)
    return bool(program.memo[key])


def is_telling(node: ast.AST) -> bool:
    """A call that prints or logs."""
    return isinstance(node, ast.Call) and bool(_TOLD.search(last_name(node.func)))


def own_nodes(program: Program, node: ast.AST) -> list[ast.AST]:
    """The nodes of the function, or the file's top, that a node stands in."""
    source = program.owner[node]
    function = function_of(source, node)
    while function is not None and (outer := function_of(source, function)) is not None:
        function = outer  # a function within a function shares its names
    return _nodes_of(program, function or source.tree)


@remembered
def _nodes_of(program: Program, scope: Function | ast.Module) -> list[ast.AST]:
    if isinstance(scope, Function):
        return list(walk(scope))
    source = program.owner[scope]
    return [each for each in source.nodes if function_of(source, each) is None]


def root_name(node: ast.AST) -> str:
    """`a` of `a.b[c].d`; `self.x` of `self.x.y`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return f"self.{node.attr}"
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def added_up(loop: Loop) -> set[str]:
    """The names that a loop's passes add to: by +=, by x = x + ..., by .append, .update and the like."""
    found = set()
    made = {each.id for each in walk(loop) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    for node in walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(attr="update"), args=[ast.Name(id=given)]) if given not in made:
                pass  # of a moving average, which is given the model and nothing that a pass makes
            case ast.AugAssign(target=target, op=ast.Add()) | ast.Assign(targets=[ast.Subscript() as target]):
                found.add(root_name(target))
            case ast.Assign(targets=[target], value=ast.BinOp(left=left)) if root_name(left) == root_name(target):
                found.add(root_name(target))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _smoothed(value, name):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _ADDING:
                found.add(root_name(value))
    return found - {"", "optimizer", "pbar", "progress_bar", "bar", "tbar", "step", "global_step", "i", "steps"}


def _smoothed(value: ast.expr, name: str) -> bool:
    """0.9 * average + 0.1 * loss, perhaps beside the first pass's loss."""
    sums = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    return any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add) and mentions(each, {name}) for each in sums)


def tainted(nodes: list[ast.AST], names: set[str]) -> set[str]:
    """These names, and those that are computed from them in the same function."""
    found = set(names)
    while True:
        size = len(found)
        for node in nodes:
            if isinstance(node, ast.For) and _written_out(node.iter) and mentions(node.iter, found):
                found |= {each.id for each in walk(node.target) if isinstance(each, ast.Name)}
            if isinstance(node, ast.Call) and (kept := _kept_in(node)) and mentions(node.args[-1], found):
                found.add(kept)
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if mentions(node.value, found):
                    for target in targets:
                        parts = target.elts if isinstance(target, ast.Tuple) else [target]
                        found |= {root_name(part) for part in parts} - {""}
        if len(found) == size:
            return found


def _kept_in(call: ast.Call) -> str:
    """`history` of history["loss"].append(x)."""
    match call.func:
        case ast.Attribute(value=ast.Name() | ast.Subscript() | ast.Attribute() as holder, attr="append" | "extend"):
            return root_name(holder) if call.args and root_name(holder) != "self" else ""
    return ""


def _written_out(node: ast.expr) -> bool:
    """(a, b), sums.values(), zip(a, b): a loop over a few numbers."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in ("values", "items", "zip", "enumerate") and "loader" not in text_of(node)
    return isinstance(node, ast.Tuple | ast.List)


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Whether one of these names is read within a node."""
    known: set[str] | None = node.__dict__.get("mentioned")
    if known is None:
        known = {each.id for each in walk(node) if isinstance(each, ast.Name)}
        known |= {root_name(each) for each in walk(node) if isinstance(each, ast.Attribute)}
        node.__dict__["mentioned"] = known
    return not known.isdisjoint(names)


def first_read(program: Program, loop: Loop) -> ast.stmt | None:
    """The first statement after a loop that reads what it added up: where the ranks' sums had to be added."""
    source, last = program.owner[loop], loop.end_lineno or 0
    names = added_up(loop)
    known = [each for each in own_nodes(program, loop) if isinstance(each, ast.stmt) and each.lineno > last]
    for each in sorted(known, key=lambda one: one.lineno):
        parts = [each] if not hasattr(each, "body") else [part for part in children(each) if isinstance(part, ast.expr)]
        if function_of(source, each) is function_of(source, loop) and any(mentions(part, names) for part in parts):
            return each
    return None


def text_around(program: Program, node: ast.AST, before: int = 2) -> str:
    """The lines of a statement, and the comments right above it."""
    source = program.owner[node]
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
    above = [line for line in source.lines[max(0, first - 1 - before) : first - 1] if line.strip().startswith("#")]
    return "\n".join([*above, *source.lines[first - 1 : last]])


@remembered
def option(program: Program, name: str) -> tuple[str, ast.expr | None]:
    """The help and the default of a command-line option, by the name of its value; of several files' all helps."""
    helps, defaults = list[str](), list[ast.expr | None]()
    for call in [*program.named.get("add_argument", []), *program.named.get("option", [])]:
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        named = {each.lstrip("-").replace("-", "_") for each in texts}
        keywords = {each.arg: each.value for each in call.keywords}
        if name in named:
            said = keywords.get("help")
            parts = [each.value for each in walk(said) if isinstance(each, ast.Constant)] if said else []
            helps.append(" ".join(map(str, parts)))
            defaults.append(keywords.get("default"))
    return "; ".join(helps), next(iter(defaults), None)
