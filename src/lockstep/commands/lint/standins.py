"""Library functions under other names: `write = torch.save`, a partial of it, a thread or a pool that is handed it."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered

_POOLS = {"submit", "apply_async", "run_in_executor", "to_thread", "call_soon", "add_callback"}
_STARTED = {"Thread", "Process", "Timer"}


@remembered
def runs(program: Program, meaning: str) -> dict[ast.Call, ast.Call]:
    """The calls that run a library's function -> the same as if they said so: its arguments, in its own order."""
    name = meaning.rpartition(".")[2]
    found = {call: call for call in program.named.get(name, []) if qualified(program, call.func) == meaning}
    for mention in _mentions(program, meaning, name):
        for call, seen in _behind(program, mention):
            found.setdefault(call, seen)
    return found


def _mentions(program: Program, meaning: str, name: str) -> Iterator[ast.expr]:
    """Where a function is named and not called at once."""
    pattern = re.compile(rf"\b{name}\b(?!\s*\()")
    for source in program.sources:
        if name not in source.text or not pattern.search(source.text):
            continue
        nodes: list[ast.Name | ast.Attribute] = [*source.of(ast.Name), *source.of(ast.Attribute)]
        for node in nodes:
            if isinstance(node.ctx, ast.Load):
                parent = source.parents[node]
                called = isinstance(parent, ast.Call) and parent.func is node
                if not called and (last_name(node) == name or isinstance(node, ast.Name)):
                    known = last_name(node) == name or _imported(program, node, name)
                    if known and qualified(program, node) == meaning:
                        yield node


def _imported(program: Program, node: ast.expr, name: str) -> bool:
    """Whether a name of the file's top is `name` of a module, imported under another."""
    found = program.owner[node].names.get(program.owner[node].tree, {}).get(getattr(node, "id", ""), [])
    return any(each.kind == "import" and each.target.endswith(f":{name}") for each in found)


def _behind(program: Program, mention: ast.expr) -> Iterator[tuple[ast.Call, ast.Call]]:
    """The calls that a mention of a function leads to."""
    source = program.owner[mention]
    parent = source.parents[mention]
    if isinstance(parent, ast.keyword):
        parent = source.parents[parent]
    if not isinstance(parent, ast.Call):
        yield from ((call, _seen(mention, call.args, call.keywords)) for call in _through(program, mention))
        return
    name, place = last_name(parent.func), parent.args.index(mention) if mention in parent.args else -1
    if name == "partial" and place == 0:
        for call in _through(program, parent):
            own = {each.arg for each in call.keywords}
            kept = [each for each in parent.keywords if each.arg not in own]
            yield call, _seen(mention, [*parent.args[1:], *call.args], [*call.keywords, *kept])
    elif name in _POOLS and place >= 0 and callee(program, parent) is None:
        yield parent, _seen(mention, _listed(parent.args[place + 1 :], name), parent.keywords)
    elif name in _STARTED:
        keywords = {each.arg: each.value for each in parent.keywords}
        given, named = keywords.get("args"), keywords.get("kwargs")
        args = list(given.elts) if isinstance(given, ast.Tuple | ast.List) else []
        pairs = zip(named.keys, named.values, strict=True) if isinstance(named, ast.Dict) else ()
        spread = [ast.keyword(str(key.value), each) for key, each in pairs if isinstance(key, ast.Constant)]
        yield parent, _seen(mention, args, spread)
    elif callee(program, parent) is not None:  # handed to a local function, which calls its parameter
        yield from ((call, _seen(mention, call.args, call.keywords)) for call in _through(program, mention))


def _listed(args: list[ast.expr], name: str) -> list[ast.expr]:
    """The arguments that apply_async is given as a tuple; those of the others stand by themselves."""
    first = args[0] if args and name == "apply_async" else None
    return list(first.elts) if isinstance(first, ast.Tuple | ast.List) else args


def _seen(function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.Call:
    return ast.Call(function, list(args), list(keywords))


def _through(program: Program, made: ast.expr) -> list[ast.Call]:
    """The calls of what may be this expression, by a name, an attribute or an entry."""
    return [
        call
        for call in program.calls
        if isinstance(call.func, ast.Name | ast.Attribute | ast.Subscript)
        and callee(program, call) is None
        and not _library(qualified(program, call.func))
        and made in origins(program, call.func)
    ]


def _library(meaning: str) -> bool:
    return "." in meaning and not meaning.endswith(".py")
