"""What a run keeps beside its weights: optimizers, scalers, and schedules that count their own steps."""

import ast
import re

from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import optimizers
from lockstep.commands.lint.source import parameters
from lockstep.commands.lint.tree import text_of, walk


@remembered
def roles(program: Program) -> dict[ast.AST, str]:
    """The calls that make what a run keeps beside its weights -> what that is."""
    found: dict[ast.AST, str] = dict.fromkeys(optimizers(program), "optimizer")
    for name in ("GradScaler", "NativeScaler"):
        found |= dict.fromkeys(program.named.get(name, []), "scaler")
    return found | dict.fromkeys(schedulers(program), "scheduler")


def held(program: Program, made: ast.Dict) -> list[str]:
    """What a dictionary's values are, by what made the objects in them: `optimizer`, `scheduler`, `scaler`, trainer."""
    known = roles(program) | dict.fromkeys(program.named.get("Engine", []), "trainer")
    parts = [each for value in made.values for each in walk(value) if isinstance(each, ast.Name | ast.Attribute)]
    return [role for each in parts for one in origins(program, each) if (role := known.get(one))]


@remembered
def schedulers(program: Program) -> list[ast.Call]:
    """The calls that make a schedule which counts its own steps: torch's, a local subclass's, a local class's."""
    found = []
    for call in program.calls:
        owner = definition(program, call.func)
        if ".lr_scheduler." in qualified(program, call.func) or (
            isinstance(owner, ast.ClassDef) and _counts_steps(program, owner)
        ):
            found.append(call)
    return found


def _counts_steps(program: Program, owner: ast.ClassDef) -> bool:
    if any(".lr_scheduler." in qualified(program, base) for base in owner.bases):
        return True
    step = method(program, owner, "step")
    if step is None or len(parameters(step)) > 1:
        return False
    text = text_of(step)
    sets = re.search(r"\[['\"]lr['\"]\] (\*|/)?= ", text_of(owner))
    return bool(sets) and bool(re.search(r"self\.\w+ \+= 1", text)) and "zero_grad" not in text


def named_in(program: Program, role: str, text: str) -> bool:
    """Whether a text has a name that an object of this role is bound to somewhere: `run.plan.state_dict()`."""
    for made in [each for each, one in roles(program).items() if one == role]:
        parent = program.owner[made].parents[made]
        for target in parent.targets if isinstance(parent, ast.Assign) else []:
            name = last_name(target) if isinstance(target, ast.Name | ast.Attribute) else ""
            if len(name) > 1 and re.search(rf"\b{re.escape(name)}\b", text):
                return True
    return False
