"""What a program's checkpoints hold: the expressions that torch.save writes, followed to what they are made of."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import definition, instance_of, method
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.rules.parties import roles
from lockstep.commands.lint.rules.states import stored
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Function, parameters
from lockstep.commands.lint.tree import text_of, walk

_DEPTH = 8  # dictionaries within dictionaries, and objects that hold them


@remembered
def written(program: Program) -> list[tuple[ast.Call, str | None]]:
    """The calls that write a checkpoint, and what each writes as text; None where that can't be told."""
    return [(call, _saved_text(program, state)) for call, state in _writers(program)]


def _writers(program: Program) -> list[tuple[ast.Call, ast.expr | None]]:
    """The calls that write a checkpoint and what; in place of a local wrapper's own those of the wrapper."""
    found: list[tuple[ast.Call, ast.expr | None]] = []
    for each in stored(program):
        function = function_of(program.owner[each.call], each.call)
        names = [each.arg for each in parameters(function)] if function is not None else []
        first = each.call.args[0] if each.call.args and each.state is None else each.state
        handed = isinstance(first, ast.Starred) or (isinstance(first, ast.Name) and first.id == next(iter(names), ""))
        known = [site.call for site in sites(program, function) if site.call.args] if function is not None else []
        found += [(one, one.args[0]) for one in known] if handed and known else [(each.call, each.state)]
    return found


def _saved_text(program: Program, state: ast.expr | None) -> str | None:
    if state is None or isinstance(state, ast.Starred):
        return None
    return _text(program, state, 0)


def _text(program: Program, node: ast.expr, depth: int) -> str | None:
    """A value as text, with what its names hold; None where a part can't be told."""
    found = origins(program, node) if depth < _DEPTH else []
    packed = isinstance(node, ast.Call) and bool(found) and node not in found  # what it is given need not be in it
    parts = [] if packed else [text_of(node), *_parts(program, node)]
    for made in found:
        inner = _made(program, made, depth)
        if inner is None:
            return None
        parts.append(inner)
    added = _added(program, node, depth)
    return None if added is None else "\n".join([*parts, added])


def _made(program: Program, made: ast.AST, depth: int) -> str | None:
    match made:
        case ast.arg():
            return None
        case ast.Dict(keys=keys, values=values):
            inner = [_text(program, value, depth + 1) for key, value in zip(keys, values, strict=True) if key is None]
            return _joined([text_of(made), *_parts(program, made), *inner])
        case ast.DictComp(generators=generators):
            inner = [_members(program, each.iter, depth) for each in generators]
            return _joined([text_of(made), *inner])
        case ast.Name(id=name):
            return _by_name(program, made, name)
        case ast.Call():
            return _called(program, made, depth)
        case ast.BinOp(left=left, right=right, op=ast.BitOr()):
            return _joined([_text(program, left, depth + 1), _text(program, right, depth + 1)])
        case ast.Subscript(value=value):
            return _joined([text_of(made), _text(program, value, depth + 1)])
        case ast.Attribute():
            return None
        case ast.For():
            return text_of(made.iter)
        case ast.stmt() | ast.comprehension():
            return ""  # the place that binds a name
    return text_of(made)


def _joined(parts: list[str | None]) -> str | None:
    known = [each for each in parts if each is not None]
    return "\n".join(known) if len(known) == len(parts) else None


def _called(program: Program, made: ast.Call, depth: int) -> str | None:
    """dict(...), x.state_dict(), asdict(x), and an object of a local class."""
    name, text = last_name(made.func), text_of(made)
    known = [text, *_parts(program, made)]
    if name == "dict":
        spread = [each.value for each in made.keywords if each.arg is None] + made.args
        return _joined([*known, *(_text(program, each, depth + 1) for each in spread)])
    if name in ("asdict", "vars") and len(made.args) == 1:
        return _joined([*known, _text(program, made.args[0], depth + 1)])
    owner = definition(program, made.func)
    if isinstance(owner, ast.ClassDef):
        fields = " ".join(text_of(each.target) for each in owner.body if isinstance(each, ast.AnnAssign))
        return "\n".join([*known, fields])
    if name != "state_dict":
        return None
    if isinstance(made.func, ast.Attribute) and (local := instance_of(program, made.func.value)) is not None:
        own = method(program, local, "state_dict")
        values = [each for each in returns(program, own) if each is not None] if own is not None else []
        return _joined([*known, *(_text(program, each, depth + 1) for each in values)])
    return "\n".join(known)


def _parts(program: Program, node: ast.AST) -> list[str]:
    """What the names within an expression are, by what made them."""
    return [
        role
        for each in walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
        for made in origins(program, each)
        if (role := roles(program).get(made))
    ]


def _members(program: Program, node: ast.expr, depth: int) -> str | None:
    """What a loop over a dictionary, or over pairs that are written out, goes through."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "keys"):
        node = node.func.value
    node = _of_class(program, node) or node
    found = origins(program, node)
    if not found or not all(isinstance(each, ast.Dict | ast.List | ast.Tuple | ast.Name) for each in found):
        return None
    for each in found:
        if isinstance(each, ast.Name) and _by_name(program, each, each.id) is None:
            return None
    return _text(program, node, depth + 1)


def _of_class(program: Program, node: ast.expr) -> ast.expr | None:
    """The value of self.NAMES that the class itself binds."""
    source = program.owner[node]
    owner = class_of(source, node)
    if not isinstance(node, ast.Attribute) or owner is None or not isinstance(node.value, ast.Name):
        return None
    found = source.names.get(owner, {}).get(node.attr, []) if node.value.id in ("self", "cls", owner.name) else []
    values = [each.value for each in found if each.kind == "value" and isinstance(each.value, ast.expr)]
    return values[0] if len(values) == 1 else None


def _by_name(program: Program, node: ast.Name, name: str) -> str | None:
    """What calls give to `**parts`, a function's own; None where it is no such name or can't be told."""
    function = function_of(program.owner[node], node)
    if function is None or function.args.kwarg is None or function.args.kwarg.arg != name:
        return None
    own, known = {each.arg for each in parameters(function)}, sites(program, function)
    parts: list[str | None] = []
    for site in known:
        for each in site.call.keywords:
            if each.arg is None:
                return None
            if each.arg not in own:
                parts.append(" ".join([each.arg, text_of(each.value), *_parts(program, each.value)]))
    return _joined(parts) if known else None


def _added(program: Program, node: ast.expr, depth: int) -> str | None:
    """What is put into a dictionary after it was made: state["x"] = ..., state.update(...)."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return ""
    text, source = text_of(node), program.owner[node]
    parts: list[str | None] = []
    for target, found in source.attributes.items():
        if not target.startswith(f"{text}["):
            continue
        for binding in found:
            if isinstance(node, ast.Name) and not _same_scope(program, node, binding.node):
                continue
            values = [] if binding.value is None else [text_of(binding.value), *_parts(program, binding.value)]
            parts += [target, *values, _index(program, binding.node, target, text, depth)]
    for name in ("update", "setdefault", "append"):
        for call in program.named.get(name, []):
            if isinstance(call.func, ast.Attribute) and text_of(call.func.value) == text:
                parts += [text_of(call), *_parts(program, call)]
                parts += [_text(program, each, depth + 1) for each in call.args if depth < _DEPTH]
    return _joined([*parts, *_filled(program, node)])


def _same_scope(program: Program, one: ast.AST, other: ast.AST) -> bool:
    source = program.owner[one]
    return function_of(source, one) is function_of(source, other)


def _index(program: Program, place: ast.AST, target: str, text: str, depth: int) -> str | None:
    """The names under which a loop, or a method that registers, fills a dictionary."""
    key = target.removeprefix(f"{text}[").removesuffix("]")
    if not key.isidentifier():
        return key
    source = program.owner[place]
    for outer in above(source, place):
        if isinstance(outer, ast.For) and key in {n.id for n in walk(outer.target) if isinstance(n, ast.Name)}:
            return _members(program, outer.iter, depth)
        if isinstance(outer, Function):
            if key not in {each.arg for each in parameters(outer)}:
                return key if bindings(program, place, key) else None
            given = [site.call for site in sites(program, outer)]
            texts = ["\n".join([text_of(each), *_parts(program, each)]) for each in given]
            return "\n".join(texts) if given else None
    return key


def _filled(program: Program, node: ast.expr) -> Iterator[str]:
    """What local functions that are given a dictionary put into it."""
    if not isinstance(node, ast.Name):
        return
    for call in own_nodes(program, node):
        if not isinstance(call, ast.Call) or not any(
            isinstance(each, ast.Name) and each.id == node.id for each in call.args
        ):
            continue
        function = definition(program, call.func)
        for parameter in parameters(function) if isinstance(function, Function) else []:
            for site in sites(program, function) if isinstance(function, Function) else []:
                value = argument(site, parameter.arg)
                if site.call is call and isinstance(value, ast.Name) and value.id == node.id:
                    home = program.owner[parameter].attributes
                    yield from (text for text in home if text.startswith(f"{parameter.arg}["))
