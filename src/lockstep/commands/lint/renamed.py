"""What is called by another name than its own: imported under another, given one by assignment, looked up by a text.

A call's function is marked with what it stands for: `imported` is the name that it has where it comes from,
`stands_for` the expression that says so, `filled` the partial() that has given it arguments already.
"""

import ast

from lockstep.commands.lint.source import Binding, Source
from lockstep.commands.lint.tree import text_of


def rename(source: Source) -> Source:
    """`Loader` of `import DataLoader as Loader`, TABLE["adam"], getattr(models, "vit") keep the names they have."""
    renamed = {}
    for name, found in source.names.get(source.tree, {}).items():
        real = found[0].target.rpartition(":")[2]
        if len(found) == 1 and found[0].kind == "import" and ":" in found[0].target and real != name:
            renamed[name] = real
    alone = _bound_once(source)
    for node in source.of(ast.Call):
        for each in [node.func, *node.args[:1]]:
            if isinstance(each, ast.Name) and each.id in renamed:
                each.__dict__["imported"] = renamed[each.id]
        meant = _meant(source, alone, node.func)
        if isinstance(meant, ast.Call):
            node.func.__dict__["filled"], meant = meant, meant.args[0]
        if meant is not None:
            written = meant.attr if isinstance(meant, ast.Attribute) else getattr(meant, "id", "")
            node.func.__dict__.update(stands_for=meant, imported=renamed.get(written, written))
    return source


def _bound_once(source: Source) -> dict[str, ast.AST]:
    """The names and attributes that a file binds once -> to what."""
    bound: dict[str, list[Binding]] = {}
    for names in [*source.names.values(), source.attributes]:
        for name, found in names.items():
            bound.setdefault(name, []).extend(found)
    return {
        name: found[0].value
        for name, found in bound.items()
        if len(found) == 1 and found[0].kind == "value" and not found[0].path and found[0].value is not None
    }


def _meant(source: Source, alone: dict[str, ast.AST], function: ast.expr) -> ast.AST | None:
    """What a call's function stands for: an import's or the file's own function or class, or a partial() of one."""
    match function:
        case ast.Name() | ast.Attribute():
            made = alone.get(text_of(function))
            return made if _is_partial(made) or (isinstance(made, ast.Attribute) and _has_name(source, made)) else None
        case ast.Subscript(value=ast.Name() | ast.Attribute() as table, slice=ast.Constant(value=str(key))):
            if isinstance(table, ast.Attribute) and table.attr == "__dict__":
                return _looked_up(source, table.value, key)
            made = alone.get(text_of(table))
            entry = _entry(source, text_of(table), made, key) if isinstance(made, ast.Dict) else None
            return entry if entry is not None and (_is_partial(entry) or _has_name(source, entry)) else None
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(key)), *_]):
            return _looked_up(source, owner, key)
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner]), slice=ast.Constant(value=str(key))):
            return _looked_up(source, owner, key)
    return None


def _looked_up(source: Source, owner: ast.expr, key: str) -> ast.AST | None:
    """`models.resnet18` for what is looked up in an imported module by the text of its name."""
    return ast.Attribute(owner, key, ast.Load()) if _has_name(source, owner) else None


def _entry(source: Source, name: str, table: ast.Dict, key: str) -> ast.expr | None:
    """The entry of a dictionary that is written out, and changed nowhere in the file."""
    changed = any(each.startswith(f"{name}[") for each in source.attributes)
    if changed or any(f"{name}.{each}(" in source.text for each in ("update", "setdefault", "pop")):
        return None
    pairs = zip(table.keys, table.values, strict=True)
    known = [value for each, value in pairs if isinstance(each, ast.Constant) and each.value == key]
    return known[0] if len(known) == 1 and None not in table.keys else None


def _is_partial(made: ast.AST | None) -> bool:
    """partial(f, ...) of something that has a name."""
    match made:
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[first, *_]):
            return isinstance(first, ast.Name | ast.Attribute)
    return False


def _has_name(source: Source, node: ast.AST) -> bool:
    """Whether an expression is an import's, or what the file's top defines."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    found = source.names.get(source.tree, {}).get(root.id, []) if isinstance(root, ast.Name) else []
    kinds = ("import",) if node is not root else ("import", "def", "class")
    return len(found) == 1 and found[0].kind in kinds
