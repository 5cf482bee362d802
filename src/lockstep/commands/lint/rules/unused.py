"""The rule about find_unused_parameters."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_lightning import unused
from lockstep.commands.lint.several import wrapped
from lockstep.commands.lint.tree import text_of, walk


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


_MODELS = re.compile(
    r"^(tf_|se)?(resne[xt]t?|wide_resnet|vgg|alexnet|mobilenet|densenet|vit_|deit_|convnext|efficientnet|regnet|shufflenet|swin"
    r"|squeezenet|mnasnet|maxvit|beit|mixer)"
)


def _straight(program: Program, made: ast.AST, depth: int = 0) -> bool:
    """Whether a model's forward runs the same modules in each step, as far as the text tells."""
    if not isinstance(made, ast.Call) or depth > 5:
        return False
    name = qualified(program, made.func)
    if name.startswith("torchvision.models.") or name == "timm.create_model":
        kind = name.rpartition(".")[2]
        named = kind in ("get_model", "create_model")
        key = given(program, made, "name", 0) if named else ast.Constant(kind)
        by_option = _chosen(program, key) if name.startswith("torchvision.") else constant(program, key)
        return bool(_MODELS.search(str(by_option)))
    if (key := _looked_up(program, made.func)) is not None:
        return bool(_MODELS.search(_chosen(program, key)))
    if isinstance(made.func, ast.Subscript):  # {"small": Small, "large": Large}[name]()
        kinds = [one for each in origins(program, made.func.value) if isinstance(each, ast.Dict) for one in each.values]
        owners = [definition(program, each) for each in kinds]
        known = [each for each in owners if isinstance(each, ast.ClassDef)]
        return 0 < len(known) == len(owners) and all(_forward_is_straight(program, each, depth) for each in known)
    owner = definition(program, made.func)
    if isinstance(owner, ast.ClassDef):
        return _forward_is_straight(program, owner, depth)
    if name.endswith("nn.Sequential"):
        parts = [each for each in made.args if isinstance(each, ast.Call)]
        local = [each for each in parts if not qualified(program, each.func).startswith("torch.nn.")]
        return len(parts) == len(made.args) and all(_straight(program, each, depth + 1) for each in local)
    return False


def _looked_up(program: Program, function: ast.expr) -> ast.expr | None:
    """The name in getattr(models, name), and in models.__dict__[name], of torchvision's models."""
    match function:
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, key, *_]):
            return key if qualified(program, owner) == "torchvision.models" else None
        case ast.Subscript(value=ast.Attribute(value=owner, attr="__dict__"), slice=key):
            return key if qualified(program, owner) == "torchvision.models" else None
    return None


def _chosen(program: Program, node: ast.expr | None) -> str:
    """A name that is written out, or that an option has by default in a program that minds no model's second output."""
    found = constant(program, node)
    minds = any(re.search("inception|googlenet|aux", source.lower) for source in program.sources)
    if found is ... and isinstance(node, ast.Attribute) and not minds:
        found = constant(program, option(program, node.attr)[1])
    return found if isinstance(found, str) else ""


def _forward_is_straight(program: Program, owner: ast.ClassDef, depth: int) -> bool:
    forward = method(program, owner, "forward")
    if forward is None or any(_chooses(program, each) for each in walk(forward)):
        return False
    several = any(
        isinstance(each, ast.Tuple | ast.List | ast.Dict | ast.ListComp) for each in returns(program, forward)
    )
    if several and not _all_are_used(program):
        return False
    for node in walk(owner):
        inner = definition(program, node.func) if isinstance(node, ast.Call) else None
        part = isinstance(inner, ast.ClassDef) and inner is not owner and method(program, inner, "forward") is not None
        if part and not _straight(program, node, depth + 1):
            return False
    return True


_BY_CHANCE = (
    "rand",
    "random",
    "randint",
    "randperm",
    "choice",
    "sample",
    "bernoulli",
    "uniform",
    "multinomial",
    "no_grad",
)


def _chooses(program: Program, node: ast.AST) -> bool:
    """Whether a part of forward may be left out in one step and run in another."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            return not _fixed(program, test)
        case ast.For(iter=items):
            return any(isinstance(each, ast.Break | ast.Continue) for each in walk(node)) or not _own_layers(items)
        case ast.comprehension(iter=items, ifs=tests):
            return bool(tests) or not _own_layers(items)
        case ast.With(items=items):
            return any("autocast" not in text_of(each.context_expr) for each in items)
        case ast.Call(func=function):
            return (isinstance(function, ast.Subscript) and not isinstance(function.slice, ast.Constant)) or last_name(
                function
            ) in _BY_CHANCE
    return isinstance(node, ast.While | ast.Try | ast.Match)


def _fixed(program: Program, test: ast.expr) -> bool:
    """A condition on what the module was made with: self.x, self.x is not None."""
    names = [each for each in walk(test) if isinstance(each, ast.Name | ast.Attribute)]
    own = all(each.id == "self" if isinstance(each, ast.Name) else each.attr != "training" for each in names)
    switched = {
        text.rpartition(".")[2]
        for source in program.sources
        for text in source.attributes
        if not text.startswith("self.") or text.count(".") > 1
    }
    apart = not any(isinstance(each, ast.Attribute) and each.attr in switched for each in names)
    return own and apart and not any(isinstance(each, ast.Call) for each in walk(test))


def _own_layers(items: ast.expr) -> bool:
    """self.layers, enumerate(self.layers): all of them, in each step."""
    if isinstance(items, ast.Call) and last_name(items.func) in ("enumerate", "zip", "reversed"):
        return all(_own_layers(each) or isinstance(each, ast.Name) for each in items.args)
    return isinstance(items, ast.Attribute) and text_of(items).startswith("self.")


def _all_are_used(program: Program) -> bool:
    """Whether no step chooses among a model's outputs: by a condition with an else, or a name that nobody reads."""
    for loop in step_loops(program):
        nodes = inside(program, loop)
        if any(isinstance(each, ast.IfExp) or (isinstance(each, ast.If) and each.orelse) for each in nodes):
            return False
        read = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
        for each in nodes:
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            parts = target.elts if isinstance(target, ast.Tuple) else []
            if any(isinstance(part, ast.Name) and part.id not in read for part in parts):
                return False
    return True
