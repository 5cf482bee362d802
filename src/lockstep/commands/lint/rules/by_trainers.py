"""What rules look for where Lightning's Trainer or Ignite brings a run back: by which file, and into what."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.several import library, lightning
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.tree import text_of, walk


def weights_alone(program: Program) -> Iterator[Hit]:
    """ModelCheckpoint(save_weights_only=True) in a script whose Trainer goes on from a file."""
    if not lightning(program) or not any(_goes_on(program, call) for call in program.named.get("fit", [])):
        return
    known = program.named.get("ModelCheckpoint", [])
    alone = [each for each in known if constant(program, given(program, each, "save_weights_only")) is True]
    if alone and len(alone) == len(known):
        yield Hit(alone[0], "without optimizer, scheduler, epoch")


def _goes_on(program: Program, fit: ast.Call) -> bool:
    path = given(program, fit, "ckpt_path")
    return path is not None and any(
        not (isinstance(made, ast.Constant) and made.value is None) for made in origins(program, path)
    )


def reloaded(program: Program) -> Iterator[Hit]:
    """load_from_checkpoint under a condition that says resume, and fit() of that model without ckpt_path."""
    if not lightning(program):
        return
    loaded = [each for each in program.named.get("load_from_checkpoint", []) if _says_resume(program, each)]
    filled = {made for call in program.named.get("load_state_dict", []) for made in _resumed(program, call)}
    for fit in program.named.get("fit", []) if loaded or filled else []:
        model = given(program, fit, "model", 0)
        told = given(program, fit, "ckpt_path") is not None or any(each.arg is None for each in fit.keywords)
        if model is None or told:
            continue
        if filled & set(origins(program, model)) or depends(program, model, lambda each: each in loaded):
            yield Hit(fit, "weights alone were loaded")


def _resumed(program: Program, call: ast.Call) -> list[ast.AST]:
    """What made the model that load_state_dict fills whole, under a condition that says resume."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    part = constant(program, given(program, call, "strict", 1)) is False
    return origins(program, owner) if owner is not None and not part and _says_resume(program, call) else []


def _says_resume(program: Program, call: ast.Call) -> bool:
    source = program.owner[call]
    function = function_of(source, call)
    places = [call, *([site.call for site in sites(program, function)] if function is not None else [])]
    tests = [
        text_of(outer.test)
        for each in places
        for outer in above(program.owner[each], each)
        if isinstance(outer, ast.If | ast.IfExp)
    ]
    return bool(re.search(r"resum|restart|continu", " ".join([*tests, *map(text_of, call.args)]).lower()))


def trainer_not_loaded(program: Program) -> Iterator[Hit]:
    """Ignite's load_objects without the trainer, which the checkpoint has: the engine counts from 0."""
    if not library(program, "ignite"):
        return
    kept = [_keys(program, call, "to_save") for call in program.named.get("Checkpoint", [])]
    if not any(keys is not None and "trainer" in keys for keys in kept):
        return
    for call in program.named.get("load_objects", []):
        keys = _keys(program, call, "to_load")
        if keys is not None and "trainer" not in keys and re.search("optim|opt", keys):
            yield Hit(call, "the trainer is not loaded")


def _keys(program: Program, call: ast.Call, name: str) -> str | None:
    """The names in a dictionary of objects that is written out."""
    value = given(program, call, name, 0)
    found = origins(program, value) if value is not None else []
    if not found or not all(isinstance(each, ast.Dict) and None not in each.keys for each in found):
        return None
    text = " ".join(text_of(each) for each in found)
    if isinstance(value, ast.Name):
        home = program.owner[call].attributes
        text += " ".join(target for target in home if target.startswith(f"{value.id}["))
    parts = [each for one in found for each in walk(one) if isinstance(each, ast.Name | ast.Attribute)]
    engines = any(
        isinstance(made, ast.Call) and last_name(made.func) in ("Engine", "create_supervised_trainer")
        for each in parts
        for made in origins(program, each)
    )
    return text.lower() + (" trainer" if engines else "")
