"""Objects that are the wrapper, whose state's keys begin with `module.`, and what is loaded into them again."""

import ast

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import optimizers
from lockstep.commands.lint.several import wraps
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.tree import text_of, walk


def surely_wrapped(program: Program, node: ast.AST) -> bool:
    """Whether an object is the wrapper, on no way the network within it."""
    if _taken_off(program, node):
        return False
    copied = [
        each for each in origins(program, node) if isinstance(each, ast.Call) and last_name(each.func) == "deepcopy"
    ]
    if copied and copied == origins(program, node):
        return all(each.args and surely_wrapped(program, each.args[0]) for each in copied)
    if isinstance(node, ast.Name):
        found = reaching(program, node, bindings(program, node, node.id))
        values = [each.value for each in found]
        calls = [each for each in origins(program, node) if isinstance(each, ast.Call)]
        others = [each in optimizers(program) or last_name(each.func).endswith(("LR", "Loader")) for each in calls]
        model = not any(others)
        if values and model and all(isinstance(each, ast.Call) and _is_prepare(program, each) for each in values):
            return True
    made = [each for each in origins(program, node) if not isinstance(each, ast.Constant)]
    around = wrappers(program, node)
    inner = {each for wrap in around if wrap.args for each in origins(program, wrap.args[0])}
    return bool(around) and set(made) <= {*around, *inner}  # the plain one, where there is one process


def wrappers(program: Program, node: ast.AST) -> list[ast.Call]:
    """The wrappers whose names of parameters begin with `module.` that a value comes from."""
    return [*wraps(program, node), *made_by(program, node, "DataParallel")]


def _taken_off(program: Program, node: ast.AST) -> bool:
    """Whether the wrapper may be taken off: `model.module if hasattr(model, "module") else model`, or by a call."""
    values = [node]
    if isinstance(node, ast.Name):
        values += [each.value for each in reaching(program, node, bindings(program, node, node.id)) if each.value]
    for value in list(values):
        function = callee(program, value) if isinstance(value, ast.Call) else None
        values += [each for each in (returns(program, function) if function else []) if each is not None]
    return any(isinstance(each, ast.Attribute) and each.attr == "module" for one in values for each in walk(one))


def _before_wrapping(program: Program, call: ast.Call, owner: ast.expr) -> bool:
    """Whether the function of a call is started above the line that wraps, in that line's function."""
    function = function_of(program.owner[call], call)
    known = [site.call for site in sites(program, function)] if function is not None else []
    made = wrappers(program, owner)
    return bool(known) and all(
        function_of(program.owner[each], each) is function_of(program.owner[one], one) and each.lineno < one.lineno
        for each in known
        for one in made
    )


def _is_prepare(program: Program, call: ast.Call) -> bool:
    return last_name(call.func) == "prepare" and of_accelerator(program, call)


def of_accelerator(program: Program, call: ast.Call) -> bool:
    """Whether a method is an Accelerator's, by what made the object or by its name."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner is not None and ("accelerator" in text_of(owner) or bool(made_by(program, owner, "Accelerator")))


def loaded_wrapped(program: Program) -> list[ast.expr]:
    """What the program loads into the wrapper again: the keys fit there, within this program."""
    found = list[ast.expr]()
    for call in program.named.get("load_state_dict", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is not None and wrappers(program, owner) and not _before_wrapping(program, call, owner):
            looped = isinstance(owner, ast.Name) and "item" in {b.kind for b in bindings(program, owner, owner.id)}
            if not looped:
                found += call.args[:1] or [call]
        function = function_of(program.owner[call], call)
        if function is not None and function.args.kwarg is not None:  # restore(path, state_dict=model)
            given_by_name = [each.value for site in sites(program, function) for each in site.call.keywords]
            if any(wrappers(program, each) for each in given_by_name):
                found.append(call)
    return found
