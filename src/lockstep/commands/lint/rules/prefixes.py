"""The rule about a wrapper's state in a file, whose keys begin with `module.`."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, sites
from lockstep.commands.lint.origins import made_by, origins
from lockstep.commands.lint.parts import returns
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.roles import optimizers, wraps
from lockstep.commands.lint.rule import Hit, insert, rule
from lockstep.commands.lint.rules.saving import saves
from lockstep.commands.lint.source import above, function_of, parameters


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
    if any(
        re.search(r"['\"]module\.['\"]|consume_prefix|removeprefix|clean_state_dict", source.text)
        for source in program.sources
    ):
        return
    back = _loaded_wrapped(program)
    writers = [call for call in program.calls if _writes(program, call)]
    for call in [*saves(program), *writers]:
        whole = call.args[0] if call.args else None
        if isinstance(whole, ast.Name | ast.Attribute) and _surely_wrapped(program, whole):
            yield Hit(call)
        for node in _saved_calls(program, call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if (
                owner is not None
                and last_name(node.func) == "state_dict"
                and (_surely_wrapped(program, owner) or _entry_wrapped(program, owner))
                and not _renamed(program, node)
                and not back
            ):
                name = owner if isinstance(owner, ast.Name | ast.Attribute) else None
                edits = (insert(name.end_lineno or 0, name.end_col_offset or 0, ".module"),) if name is not None else ()
                yield Hit(node, "", edits if len(_names_in_saves(program, node)) == 1 else ())


def _writes(program: Program, call: ast.Call) -> bool:
    """accelerator.save(state, path), and a local function that hands its first parameter to torch.save."""
    name = last_name(call.func)
    if name in ("save", "prepare") and _of_accelerator(program, call):
        return name == "save"
    if name in ("save_file", "dump"):
        return qualified(program, call.func) in ("safetensors.torch.save_file", "pickle.dump")
    function = callee(program, call) if call.args else None
    names = [each.arg for each in parameters(function)] if function is not None else []
    inner = [each for each in saves(program) if each.args and function is not None and each in set(ast.walk(function))]
    return any(isinstance(each.args[0], ast.Name) and each.args[0].id in names for each in inner)


def _names_in_saves(program: Program, node: ast.Call) -> list[ast.Call]:
    return [node for call in saves(program) if node in set(ast.walk(call))] or [node]


def _surely_wrapped(program: Program, node: ast.AST) -> bool:
    """Whether an object is the wrapper, on no way the network within it."""
    if _taken_off(program, node):
        return False
    if isinstance(node, ast.Name):
        found = reaching(program, node, bindings(program, node, node.id))
        values = [each.value for each in found]
        calls = [each for each in origins(program, node) if isinstance(each, ast.Call)]
        others = [each in optimizers(program) or last_name(each.func).endswith(("LR", "Loader")) for each in calls]
        model = not any(others)
        if values and model and all(isinstance(each, ast.Call) and _is_prepare(program, each) for each in values):
            return True
    made = [each for each in origins(program, node) if not isinstance(each, ast.Constant)]
    around = wraps(program, node)
    inner = {each for wrap in around if wrap.args for each in origins(program, wrap.args[0])}
    return bool(around) and set(made) <= {*around, *inner}  # the plain one, where there is one process


def _taken_off(program: Program, node: ast.AST) -> bool:
    """Whether the wrapper may be taken off: `model.module if hasattr(model, "module") else model`, or by a call."""
    values = [node]
    if isinstance(node, ast.Name):
        values += [each.value for each in reaching(program, node, bindings(program, node, node.id)) if each.value]
    for value in list(values):
        function = callee(program, value) if isinstance(value, ast.Call) else None
        values += [each for each in (returns(program, function) if function else []) if each is not None]
    return any(isinstance(each, ast.Attribute) and each.attr == "module" for one in values for each in ast.walk(one))


def _before_wrapping(program: Program, call: ast.Call, owner: ast.expr) -> bool:
    """Whether the function of a call is started above the line that wraps, in that line's function."""
    function = function_of(program.owner[call], call)
    known = [site.call for site in sites(program, function)] if function is not None else []
    made = wraps(program, owner)
    return bool(known) and all(
        function_of(program.owner[each], each) is function_of(program.owner[one], one) and each.lineno < one.lineno
        for each in known
        for one in made
    )


def _is_prepare(program: Program, call: ast.Call) -> bool:
    return last_name(call.func) == "prepare" and _of_accelerator(program, call)


def _of_accelerator(program: Program, call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner is not None and ("accelerator" in ast.unparse(owner) or bool(made_by(program, owner, "Accelerator")))


def _entry_wrapped(program: Program, node: ast.expr) -> bool:
    """`{key: part.state_dict() for key, part in parts.items()}`, where a part is wrapped."""
    found = bindings(program, node, node.id) if isinstance(node, ast.Name) else []
    for each in found:
        match each.value:
            case ast.Call(func=ast.Attribute(value=whole, attr="items" | "values")) if each.kind == "item":
                for made in origins(program, whole):
                    values = made.values if isinstance(made, ast.Dict) else []
                    if any(_surely_wrapped(program, value) for value in values):
                        return True
    return False


def _renamed(program: Program, node: ast.AST) -> bool:
    """Whether a state's keys are written anew: `{key[7:]: value for key, value in model.state_dict().items()}`."""
    for outer in above(program.owner[node], node):
        if isinstance(outer, ast.DictComp):
            within = any(node is each for part in outer.generators for each in ast.walk(part.iter))
            return within and not isinstance(outer.key, ast.Name)
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.For)
    return False


def _loaded_wrapped(program: Program) -> bool:
    """Whether the program loads into the wrapper again: then the keys fit, within this program."""
    for call in program.named.get("load_state_dict", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is not None and wraps(program, owner) and not _before_wrapping(program, call, owner):
            return True
        function = function_of(program.owner[call], call)
        if function is not None and function.args.kwarg is not None:  # restore(path, state_dict=model)
            given_by_name = [each.value for site in sites(program, function) for each in site.call.keywords]
            if any(wraps(program, each) for each in given_by_name):
                return True
    return False


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
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                found.append(each)
                function = callee(program, each) if each.args or each.keywords else None
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
