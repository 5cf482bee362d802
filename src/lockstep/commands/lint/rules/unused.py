"""The rule about find_unused_parameters."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, qualified
from lockstep.commands.lint.roles import constant, given, wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_lightning import unused
from lockstep.commands.lint.source import Function


@rule(
    "LS313",
    "unused-parameters",
    "find_unused_parameters=True for a model that uses all of them, or never some",
    result="each step walks the graph once more; a part of the network that is never trained stays unnoticed",
    why="it is for models whose forward takes another way from step to step",
    mend="DistributedDataParallel(model)  # and drop, or use, the part that forward leaves out",
)
def unused_parameters(program: Program) -> Iterator[Hit]:
    """find_unused_parameters=True over a local module whose forward has no choice to make, or a torchvision model."""
    yield from unused(program)
    yield from _by_frameworks(program)
    for call in wrapped(program):
        value = given(program, call, "find_unused_parameters")
        if value is None or constant(program, value) is not True or not call.args:
            continue
        made = origins(program, call.args[0])
        if made and all(_straight(program, each) for each in made):
            yield Hit(value)


def _by_frameworks(program: Program) -> Iterator[Hit]:
    """The same option handed to Accelerate, Fabric or Ignite."""
    models = [
        made
        for name in ("prepare", "setup", "setup_module", "auto_model")
        for call in program.named.get(name, [])
        for each in call.args
        for made in origins(program, each)
        if isinstance(made, ast.Call) and _is_model(program, made)
    ]
    if not models or not all(_straight(program, each) for each in models):
        return
    for name in ("DistributedDataParallelKwargs", "auto_model", "DDPStrategy"):
        for call in program.named.get(name, []):
            value = given(program, call, "find_unused_parameters")
            if value is not None and constant(program, value) is True:
                yield Hit(value)
    for call in program.named.get("Fabric", []):
        strategy = given(program, call, "strategy")
        if strategy is not None and str(constant(program, strategy)).endswith("find_unused_parameters_true"):
            yield Hit(strategy)


def _is_model(program: Program, made: ast.Call) -> bool:
    name = qualified(program, made.func)
    return isinstance(definition(program, made.func), ast.ClassDef) or ".models." in name or name.endswith("Sequential")


def _straight(program: Program, made: ast.AST) -> bool:
    """Whether a model's forward runs the same modules in each step, as far as the text tells."""
    if not isinstance(made, ast.Call):
        return False
    if re.search(r"^torchvision\.models\.(resnet|vgg|alexnet|mobilenet|densenet)", qualified(program, made.func)):
        return True
    owner = definition(program, made.func)
    if not isinstance(owner, ast.ClassDef):
        return qualified(program, made.func).endswith("nn.Sequential") and all(
            isinstance(each, ast.Call) for each in made.args
        )
    forward = next((each for each in owner.body if isinstance(each, Function) and each.name == "forward"), None)
    choices = (ast.If, ast.IfExp, ast.While, ast.For, ast.Try, ast.Match, ast.ListComp, ast.With)
    return forward is not None and not any(isinstance(each, choices) for each in ast.walk(forward))
