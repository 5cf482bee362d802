"""Models that are made anew for a test: their weights are loaded, and eval() is said to another object, or to none."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.contexts import quiet
from lockstep.commands.lint.places import calls_in, collects, evaluation_loops, inside
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk

_MAKERS = ("torchvision.models.", "timm.create_model", "timm.models.")
# functions that mean to run a model in training mode: for its uncertainty, for batch norm's statistics
ON_PURPOSE = re.compile(r"mc_|monte|uncert|bn|norm|calib|recal|stochastic|adapt|warm|dropout|collect|stat|ema|swa")
_MODES = ("eval", "train", "apply", "modules", "named_modules", "children")


def fresh_and_tested(program: Program) -> Iterator[ast.AST]:
    """Where a model that this function made, and loaded weights into, is tested in the mode that it was made in."""
    for load in program.named.get("load_state_dict", []):
        model = load.func.value if isinstance(load.func, ast.Attribute) else None
        if isinstance(model, ast.Name) and _is_fresh(program, model):
            yield from _tests(program, model)


def _is_fresh(program: Program, node: ast.expr | None, depth: int = 0) -> bool:
    """Whether a model was made just now, and nothing has been said of its mode: it is in training mode."""
    match node:
        case ast.Name(id=name) if depth < 6:
            found = bindings(program, node, name)
            made = [each.value for each in found if each.kind == "value" and not each.path]
            one = len(made) == len(found) == 1 and isinstance(made[0], ast.expr)
            return one and _is_fresh(program, made[0] if isinstance(made[0], ast.expr) else None, depth + 1)
        case ast.Call(func=ast.Attribute(value=inner, attr="to" | "cuda" | "cpu" | "float")):
            return _is_fresh(program, inner, depth)
        case ast.Call():
            maker = callee(program, node) or definition(program, node.func)
            if isinstance(maker, Function) and maker.name != "__init__":
                values = returns(program, maker)
                plain = not calls_in(program, maker, *_MODES) and depth < 6
                return plain and bool(values) and all(_is_fresh(program, each, depth + 1) for each in values)
            owner = definition(program, node.func)
            if isinstance(owner, ast.ClassDef):
                own = method(program, owner, "forward") is not None and method(program, owner, "train") is None
                says = any(isinstance(each, ast.Call) and last_name(each.func) in _MODES for each in walk(owner))
                return own and not says and _changes(program, owner)
            return qualified(program, node.func).startswith(_MAKERS)
    return False


def _changes(program: Program, owner: ast.ClassDef) -> bool:
    """Whether a local module has anything in it that changes with the mode, by itself or by what it is made of."""
    parts = [definition(program, each.func) for each in walk(owner) if isinstance(each, ast.Call)]
    texts = map(text_of, [owner, *(each for each in parts if isinstance(each, ast.ClassDef))])
    return any(re.search(r"[Dd]ropout|[Bb]atch_?[Nn]orm|models\.|timm|hub\.|Transformer", text) for text in texts)


def _tests(program: Program, model: ast.Name) -> Iterator[ast.AST]:
    """The tests of a name's model in its own function; none where its mode may be said, or it goes elsewhere."""
    source, home = program.owner[model], function_of(program.owner[model], model)
    found = list[ast.AST]()
    if home is not None and ON_PURPOSE.search(home.name.lower()):
        return
    for node in walk(home) if home is not None else [e for e in source.nodes if function_of(source, e) is None]:
        if not isinstance(node, ast.Name) or node.id != model.id or isinstance(node.ctx, ast.Store):
            continue
        parent = source.parents[node]
        if isinstance(parent, ast.Attribute):
            if parent.attr in _MODES:
                return
        elif isinstance(parent, ast.Call) and parent.func is node:
            around = list(above(source, node))
            loops = [each for each in around if isinstance(each, Loop) and each in evaluation_loops(program)]
            silent = next((e for e in around if isinstance(e, ast.With) and any(quiet(i) for i in e.items)), None)
            if not loops or collects(program, loops[0]) or not (silent or _is_quiet(home)):
                return
            found.append(silent or loops[0])
        elif isinstance(parent, ast.Call):
            function = callee(program, parent)
            if function is None or not _judges(program, function):
                return
            found.append(parent)
        else:
            return
    yield from found[:1]


def _is_quiet(function: Function | None) -> bool:
    return function is not None and any(map(quiet, function.decorator_list))


def _judges(program: Program, function: Function) -> bool:
    """Whether a function judges a model without gradients over a loader, and says nothing of its mode."""
    nodes = set(inside(program, function))
    loops = [each for each in evaluation_loops(program) if each in nodes]
    silent = _is_quiet(function) or any(isinstance(e, ast.With) and any(quiet(i) for i in e.items) for e in nodes)
    said = any(isinstance(each, ast.Call) and re.search("eval|train", last_name(each.func)) for each in nodes)
    said = said or bool(ON_PURPOSE.search(function.name.lower()))
    return bool(loops) and silent and not said and not any(collects(program, each) for each in loops)
