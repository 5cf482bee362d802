"""What an object holds: attributes that a local class's methods set, a dataclass's fields, a dictionary's entries."""

import ast
from collections.abc import Callable, Iterator

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import definition, descendants, lineage, method
from lockstep.commands.lint.pieces import of_field
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.settled import set_elsewhere
from lockstep.commands.lint.source import Binding
from lockstep.commands.lint.tree import text_of, walk

Part = tuple[ast.AST, tuple[int, ...]]  # an expression, and the way into it where it is a tuple that is unpacked
_FEW = 8  # of values that are written out
_BAGS = {"SimpleNamespace", "Namespace", "dict", "OrderedDict", "EasyDict", "AttrDict", "DotDict", "Munch", "Bunch"}


def of_self(program: Program, own: ast.ClassDef, text: str) -> list[Binding]:
    """What a class binds to `self.x`: itself, else its local bases, else the local classes that it is a base of."""
    for family in (lineage(program, own), descendants(program, own)):
        for each in family:
            if found := _assigned(program, each, text):
                return found
    return []


@remembered
def _assigned(program: Program, owner: ast.ClassDef, text: str) -> list[Binding]:
    home = program.owner[owner]
    return [each for each in home.attributes.get(text, []) if class_of(home, each.node) is owner]


@remembered
def attribute_bindings(program: Program, name: str) -> list[Binding]:
    """All that the program binds to `.name` of anything."""
    found = [pair for source in program.sources for pair in source.attributes.items()]
    return [each for text, bound in found if text.rpartition(".")[2] == name for each in bound]


def members(program: Program, made: ast.AST, name: str) -> list[Part]:
    """What `.name` of an object may be, by the call that made it, or by the class or the module that it is."""
    if isinstance(made, ast.ClassDef):
        bound = of_self(program, made, f"self.{name}")
        found = [(each.value, each.path) for each in bound if each.kind in ("value", "with") and each.value is not None]
        return _shown(program, made, name) or found or _of_any(program, made, name)
    if not isinstance(made, ast.Call):
        return []
    owner = definition(program, made.func)
    if isinstance(owner, ast.ClassDef):
        if method(program, owner, name) is not None:
            return _shown(program, owner, name)
        bound = of_self(program, owner, f"self.{name}")
        found = [(each.value, each.path) for each in bound if each.kind in ("value", "with") and each.value is not None]
        return found or _field(program, owner, made, name) or _of_class(program, owner, name)
    if owner is None and last_name(made.func) in _BAGS:
        return [(each.value, ()) for each in made.keywords if each.arg == name]
    return _of_tuple(program, made, name)


def _of_any(program: Program, owner: ast.ClassDef, name: str) -> list[Part]:
    """What a class says of a name itself, and what those who make a dataclass of it give for the field."""
    made = _made(program).get(owner, [])
    given = [part for call in made for part in _field(program, owner, call, name)]
    return given if given and len(given) == len(made) else [*given, *_of_class(program, owner, name)]


@remembered
def _made(program: Program) -> dict[ast.ClassDef, list[ast.Call]]:
    """The calls that make an object of each local class."""
    found: dict[ast.ClassDef, list[ast.Call]] = {}
    for call in program.calls:
        owner = definition(program, call.func)
        if isinstance(owner, ast.ClassDef):
            found.setdefault(owner, []).append(call)
    return found


def _shown(program: Program, owner: ast.ClassDef, name: str) -> list[Part]:
    """What a property returns."""
    known = method(program, owner, name)
    if known is None or not any("property" in last_name(each) for each in known.decorator_list):
        return []
    returned = [each.value for each in walk(known) if isinstance(each, ast.Return)]
    return [(each, ()) for each in returned if each is not None]


def _of_class(program: Program, owner: ast.ClassDef, name: str) -> list[Part]:
    for each in lineage(program, owner):
        bound = program.owner[each].names.get(each, {}).get(name, [])
        found = [(of_field(one.value), one.path) for one in bound if one.kind == "value" and one.value is not None]
        if found:
            return found
    return []


def _field(program: Program, owner: ast.ClassDef, made: ast.Call, name: str) -> list[Part]:
    """The argument that a dataclass, or a NamedTuple, was given for a field."""
    bases = [last_name(each) for one in lineage(program, owner) for each in one.bases]
    marks = [each.func if isinstance(each, ast.Call) else each for each in owner.decorator_list]
    if not (any(last_name(each) in ("dataclass", "define", "frozen") for each in marks) or "NamedTuple" in bases):
        return []
    fields = [
        each.target.id
        for one in reversed(lineage(program, owner))
        for each in one.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    return _given(made, fields, name)


def _of_tuple(program: Program, made: ast.Call, name: str) -> list[Part]:
    """The field of what namedtuple("Loaders", "train test") made."""
    if not isinstance(made.func, ast.Name):
        return []
    for binding in bindings(program, made.func, made.func.id):
        call = binding.value
        if isinstance(call, ast.Call) and last_name(call.func) == "namedtuple" and len(call.args) > 1:
            match call.args[1]:
                case ast.Constant(value=str(text)):
                    return _given(made, text.replace(",", " ").split(), name)
                case ast.List(elts=parts) | ast.Tuple(elts=parts):
                    return _given(made, [getattr(each, "value", "") for each in parts], name)
    return []


def _given(made: ast.Call, fields: list[str], name: str) -> list[Part]:
    for keyword in made.keywords:
        if keyword.arg == name:
            return [(keyword.value, ())]
    place = fields.index(name) if name in fields else len(made.args)
    if place < len(made.args) and not any(isinstance(each, ast.Starred) for each in made.args):
        return [(made.args[place], ())]
    return []


def entries(program: Program, made: ast.AST, index: str | int) -> list[Part]:
    """What stands at a key or a place of a dictionary or a tuple, where it is made and by assignments after that."""
    found: list[Part] = []
    match made:
        case ast.Dict():
            pairs = zip(made.keys, made.values, strict=True)
            known = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == index]
            found = [(value, ()) for value in known[-1:]]
        case ast.DictComp(value=value):
            found = [(value, ())]
        case ast.Call() if last_name(made.func) in _BAGS and definition(program, made.func) is None:
            found = [(each.value, ()) for each in made.keywords if each.arg == index]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if isinstance(index, int):
            straight = not any(isinstance(each, ast.Starred) for each in parts)
            return [(parts[index], ())] if straight and -len(parts) <= index < len(parts) else []
        case ast.Call() if last_name(made.func) not in ("defaultdict", "ModuleDict"):
            return []
        case ast.Call():
            pass
        case _:
            return []
    return [*found, *_set_later(program, made, index)]


def _set_later(program: Program, made: ast.AST, index: str | int) -> Iterator[Part]:
    """`loaders["train"] = ...` after `loaders = {}`, and `loaders[split] = ...` where no key is written out."""
    source = program.owner[made]
    for target in _targets(source.parents[made]):
        if isinstance(target, ast.Name | ast.Attribute):
            for binding in source.attributes.get(f"{text_of(target)}[{index!r}]", []):
                if binding.value is not None and _same_place(program, target, binding):
                    yield binding.value, binding.path
            for binding in _by_variable(program, made, text_of(target)):
                if binding.value is not None and _same_place(program, target, binding):
                    yield binding.value, binding.path
        if isinstance(target, ast.Name):
            for binding in set_elsewhere(program, made, target.id, index):
                if binding.value is not None:  # of `*=` the whole statement, with its operator
                    yield (binding.node if binding.kind == "aug" else binding.value), binding.path


def _targets(parent: ast.AST) -> list[ast.expr | None]:
    return list(parent.targets) if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]


def _same_place(program: Program, target: ast.Name | ast.Attribute, binding: Binding) -> bool:
    source = program.owner[target]
    if isinstance(target, ast.Attribute):
        return class_of(source, target) is class_of(source, binding.node)
    return function_of(source, target) is function_of(source, binding.node)


@remembered
def _by_variable(program: Program, made: ast.AST, text: str) -> list[Binding]:
    """The assignments to `text[name]`, where the name is a variable."""
    found = program.owner[made].attributes.items()
    known = [bound for key, bound in found if key.startswith(f"{text}[") and key[len(text) + 1 : -1].isidentifier()]
    return [each for bound in known for each in bound]


def turns(node: ast.AST, path: tuple[int, ...], follow: Callable[[ast.AST], list[ast.AST]]) -> Iterator[Part]:
    """What a loop takes one after the other: the elements of what is written out, a dictionary's values.

    `path` leads into each turn's tuple; `follow` tells where a value comes from.
    """
    match node:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]) if path and path[0] == 1:
            yield from turns(inner, path[1:], follow)
        case ast.Call(func=ast.Name(id="zip"), args=rows) if path and path[0] < len(rows):
            yield from turns(rows[path[0]], path[1:], follow)
        case ast.Call(func=ast.Attribute(value=owner, attr="values"), args=[]):
            yield from ((each, path) for made in follow(owner) for each in _held(made))
        case ast.Call(func=ast.Attribute(value=owner, attr="items"), args=[]) if path and path[0] == 1:
            yield from ((each, path[1:]) for made in follow(owner) for each in _held(made))
        case ast.Name() | ast.Attribute() | ast.List() | ast.Tuple():
            yield from ((each, path) for made in follow(node) for each in _elements(made))


def _elements(made: ast.AST) -> list[ast.expr]:
    """What stands in a tuple or a list that is written out, one after the other, or by a comprehension."""
    match made:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if 0 < len(parts) < _FEW:
            return [] if any(isinstance(each, ast.Starred) for each in parts) else parts
        case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part):
            return [part]
    return []


def _held(made: ast.AST) -> list[ast.expr]:
    """The values of a dictionary that is written out, or made by a comprehension."""
    match made:
        case ast.Dict(keys=keys, values=values) if 0 < len(values) < _FEW and None not in keys:
            return values
        case ast.DictComp(value=value):
            return [value]
    return []


def set_in_loops(program: Program, made: ast.AST, index: object) -> Iterator[tuple[ast.AST, ast.For, ast.expr]]:
    """`loaders[phase] = ...` under `for phase in ("train", "val"):`: what is assigned, the loop, and its element."""
    if not isinstance(made, ast.Dict):
        return
    source = program.owner[made]
    for target in [each for each in _targets(source.parents[made]) if isinstance(each, ast.Name | ast.Attribute)]:
        for binding in _by_variable(program, made, text_of(target)):
            if binding.value is None or binding.path or not _same_place(program, target, binding):
                continue
            for outer in above(source, binding.node):
                match outer:
                    case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=parts) | ast.List(elts=parts)):
                        asked = binding.node.targets[0] if isinstance(binding.node, ast.Assign) else None
                        named = isinstance(asked, ast.Subscript) and text_of(asked.slice) == name
                        same = [each for each in parts if isinstance(each, ast.Constant) and each.value == index]
                        yield from ((binding.value, outer, each) for each in same if named)
