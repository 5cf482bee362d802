"""The rule about a wrapper's state in a file, whose keys begin with `module.`."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.rule import Hit, insert, rule
from lockstep.commands.lint.rules.parties import held
from lockstep.commands.lint.rules.prefixed import loaded_wrapped, of_accelerator, surely_wrapped, wrappers
from lockstep.commands.lint.rules.states import as_save, saves
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import parameters
from lockstep.commands.lint.tree import walk


@rule(
    "LS403",
    "module-saved",
    "the wrapper's state is saved, whose keys all begin with `module.`",
    result="the file loads into no plain model: missing keys, or, with strict=False, not one weight and no error",
    why="DDP's state_dict() names its model module",
    mend="torch.save(model.module.state_dict(), path)",
)
def module_saved(program: Program) -> Iterator[Hit]:
    """state_dict() of what DistributedDataParallel returned, within torch.save."""
    words = ("'module.'", '"module."', "consume_prefix", "clean_state_dict")
    if any(word in source.text for source in program.sources for word in words):
        return
    back = loaded_wrapped(program)
    writers = [call for call in program.calls if _writes(program, call)]
    for real in [*saves(program), *writers]:
        call = as_save(program, real)
        whole = call.args[0] if call.args else None
        parts = whole.values if isinstance(whole, ast.Dict) else [whole]
        if any(isinstance(each, ast.Name | ast.Attribute) and surely_wrapped(program, each) for each in parts):
            yield Hit(real)
        elif back and (_of_entries(back) or _beside_a_whole(program, call)) and _is_weights(program, whole):
            yield Hit(real)  # a file of its own: what the wrapper goes on from is another
        for node in _saved_calls(program, call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if (
                owner is not None
                and last_name(node.func) == "state_dict"
                and (surely_wrapped(program, owner) or _entry_wrapped(program, owner))
                and not _renamed(program, node)
                and not back
            ):
                named = isinstance(owner, ast.Name | ast.Attribute) and surely_wrapped(program, owner)
                always = named and set(origins(program, owner)) <= set(wrappers(program, owner))
                name = owner if always else None
                edits = (insert(name.end_lineno or 0, name.end_col_offset or 0, ".module"),) if name is not None else ()
                yield Hit(node, "", edits if len(_names_in_saves(program, node)) == 1 else ())


def _writes(program: Program, call: ast.Call) -> bool:
    """accelerator.save(state, path), and a local function that hands its first parameter to torch.save."""
    name = last_name(call.func)
    if name in ("save", "prepare") and of_accelerator(program, call):
        return name == "save"
    if name in ("save_file", "dump"):
        return qualified(program, call.func) in ("safetensors.torch.save_file", "pickle.dump")
    function = callee(program, call) if call.args else None
    names = [each.arg for each in parameters(function)] if function is not None else []
    inner = [each for each in saves(program) if each.args and function is not None and each in set(walk(function))]
    return any(isinstance(each.args[0], ast.Name) and each.args[0].id in names for each in inner)


def _names_in_saves(program: Program, node: ast.Call) -> list[ast.Call]:
    return [node for call in saves(program) if node in set(walk(call))] or [node]


def _entry_wrapped(program: Program, node: ast.expr) -> bool:
    """`{key: part.state_dict() for key, part in parts.items()}`, where a part is wrapped."""
    found = bindings(program, node, node.id) if isinstance(node, ast.Name) else []
    for each in found:
        match each.value:
            case ast.Call(func=ast.Attribute(value=whole, attr="items" | "values")) if each.kind == "item":
                held = [value for made in origins(program, whole) for value in _values(program, made)]
                if any(surely_wrapped(program, value) for value in held):
                    return True
            case ast.Tuple(elts=parts) | ast.List(elts=parts) if each.kind == "item":
                if any(surely_wrapped(program, value) for value in parts):
                    return True
    return False


def _values(program: Program, made: ast.AST) -> list[ast.expr]:
    """A dictionary's values: as it is written out, or as calls give them to a function's `**parts`."""
    match made:
        case ast.Dict(values=values):
            return values
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            return [each.value for each in keywords if each.arg is not None]
        case ast.Name(id=name):
            function = function_of(program.owner[made], made)
            if function is not None and function.args.kwarg is not None and function.args.kwarg.arg == name:
                own = {each.arg for each in parameters(function)} | {None}
                return [each.value for s in sites(program, function) for each in s.call.keywords if each.arg not in own]
    return []


def _renamed(program: Program, node: ast.AST) -> bool:
    """Whether a state's keys are written anew: `{key[7:]: value for key, value in model.state_dict().items()}`."""
    for outer in above(program.owner[node], node):
        if isinstance(outer, ast.DictComp):
            within = any(node is each for part in outer.generators for each in walk(part.iter))
            return within and not isinstance(outer.key, ast.Name)
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.For)
    return False


def _of_entries(back: list[ast.expr]) -> bool:
    """Whether the wrapper is loaded from entries alone: of another file than one of weights."""
    return all(isinstance(each, ast.Subscript) for each in back)


def _beside_a_whole(program: Program, call: ast.Call) -> bool:
    """Whether the program writes a state with more than weights as well, to go on from: then these are to deliver."""
    others = [as_save(program, each) for each in saves(program)]
    wholes = [made for each in others if each is not call for arg in each.args[:1] for made in origins(program, arg)]
    return any(isinstance(each, ast.Dict) and "optimizer" in held(program, each) for each in wholes)


def _is_weights(program: Program, state: ast.expr | None) -> bool:
    """Whether what is saved is the wrapper's state by itself."""
    made = origins(program, state) if state is not None else []
    owners = [
        each.func.value
        for each in made
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "state_dict"
    ]
    return bool(made) and len(owners) == len(made) and all(surely_wrapped(program, each) for each in owners)


def _saved_calls(program: Program, call: ast.Call) -> list[ast.Call]:
    """The calls within what a torch.save writes, through names that hold a dictionary."""
    if not call.args:
        return []
    found, seen, waiting = list[ast.Call](), set[ast.AST](), [call.args[0]]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for each in walk(node):
            if isinstance(each, ast.Call):
                found.append(each)
                function = callee(program, each)
                waiting.extend(one for one in (returns(program, function) if function else []) if one is not None)
            if isinstance(each, ast.Name) and not qualified(program, each):
                for made in origins(program, each):
                    kinds = ("state_dict", "dict", "OrderedDict", "deepcopy")
                    if isinstance(made, ast.Dict | ast.DictComp) or (
                        isinstance(made, ast.Call) and last_name(made.func) in kinds
                    ):
                        waiting.append(made)
                waiting.extend(_added(program, each))
                for binding in program.owner[each].attributes.items():
                    if binding[0].startswith(f"{each.id}["):
                        waiting.extend(b.value for b in binding[1] if isinstance(b.value, ast.expr))
    return found


def _added(program: Program, name: ast.Name) -> Iterator[ast.expr]:
    """What `name.update(...)` puts into a dictionary, in the same function."""
    source = program.owner[name]
    for call in program.named.get("update", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        same = isinstance(owner, ast.Name) and owner.id == name.id and program.owner[call] is source
        if same and function_of(source, call) is function_of(source, name):
            yield from [*call.args, *(each.value for each in call.keywords)]
