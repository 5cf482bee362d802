"""What plays which part in a program: loaders, their samplers and data sets, wrapped models, the frameworks in use."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.commands.lint.aliases import filled
from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import LOADERS, evaluation_loops, loaders_of, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import calls

SHARDING = ("DistributedSampler", "RASampler", "DistributedSamplerWrapper", "RepeatAugSampler")
_DATASETS = re.compile(
    r"^torchvision\.datasets\.|^datasets\.(MNIST|FashionMNIST|KMNIST|EMNIST|QMNIST|CIFAR10|CIFAR100|SVHN|STL10|ImageFolder"
    r"|Caltech\w+|Flowers102|Food101|OxfordIIITPet|CelebA|Places365|StanfordCars|FGVCAircraft|DTD|GTSRB|USPS|VOC\w+)$"
)
_WORKED: dict[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_KINDS: dict[str, Callable[[Any], object]] = {"int": int, "float": float, "str": str}
_DEEP, _MANY = 4, 4  # operations within operations; ways to one value
_POSITIONS = {"dataset": 0, "batch_size": 1, "shuffle": 2, "sampler": 3, "batch_sampler": 4, "num_workers": 5}


def given(program: Program, call: ast.Call, name: str, position: int = -1) -> ast.expr | None:
    """An argument of a call, by name, by place, or from a dictionary that is spread into it."""
    before, named = filled(call)
    arguments = [*before, *call.args]
    for keyword in [*call.keywords, *named]:
        if keyword.arg == name:
            return keyword.value
    if 0 <= position < len(arguments) and not any(isinstance(each, ast.Starred) for each in arguments[: position + 1]):
        return arguments[position]
    for keyword in call.keywords:
        if keyword.arg is None and (found := _entry(program, keyword.value, name)) is not None:
            return found
    return None


def _entry(program: Program, spread: ast.expr, name: str) -> ast.expr | None:
    """The value that a dictionary gives to a name: where it is made, by `.update` and by `[name] = ...` after it."""
    found = None
    for made in origins(program, spread):
        if isinstance(made, ast.Dict):
            for key, value in zip(made.keys, made.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    found = value
                elif key is None and value is not spread:
                    found = _entry(program, value, name) or found
        elif isinstance(made, ast.Call) and last_name(made.func) == "dict":
            found = next((each.value for each in made.keywords if each.arg == name), found)
    if isinstance(spread, ast.Name):
        source = program.owner[spread]
        for call in program.named.get("update", []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            later = source.scopes.get(call) is source.scopes[spread] and call.lineno > spread.lineno
            if isinstance(owner, ast.Name) and owner.id == spread.id and program.owner[call] is source and not later:
                found = next((each.value for each in call.keywords if each.arg == name), found)
                found = (_entry(program, call.args[0], name) if call.args else None) or found
        for binding in source.attributes.get(f"{spread.id}[{name!r}]", []):
            if not binding.path and isinstance(binding.value, ast.expr):
                same = source.scopes[binding.node] is source.scopes[spread]
                later = getattr(binding.node, "lineno", 0) > spread.lineno
                found = binding.value if same and not later else found
    return found


def spread(call: ast.Call) -> bool:
    """Whether a call takes arguments that are not written out."""
    return any(each.arg is None for each in call.keywords) or any(isinstance(each, ast.Starred) for each in call.args)


def of_loader(program: Program, loader: ast.Call, name: str) -> ast.expr | None:
    """An argument of a DataLoader."""
    return given(program, loader, name, _POSITIONS.get(name, -1))


@remembered
def loaders(program: Program) -> list[ast.Call]:
    """The calls of torch's DataLoader, or a subclass of a library's."""
    found = [call for name in LOADERS for call in program.named.get(name, [])]
    return [each for each in found if definition(program, each.func) is None]


@remembered
def samplers(program: Program, loader: ast.Call) -> list[ast.Call]:
    """The calls that made a loader's sampler."""
    found: list[ast.Call] = []
    for name in ("sampler", "batch_sampler"):
        node = of_loader(program, loader, name)
        for made in origins(program, node) if node is not None else []:
            if isinstance(made, ast.Call):
                found.append(made)
                if last_name(made.func) == "BatchSampler" and made.args:
                    found += [each for each in origins(program, made.args[0]) if isinstance(each, ast.Call)]
    return found


@remembered
def sharding(program: Program, loader: ast.Call) -> list[ast.Call]:
    """The samplers of a loader that give each rank its own part."""
    return [
        each
        for each in samplers(program, loader)
        if last_name(each.func) in SHARDING and definition(program, each.func) is None
    ]


def drops(program: Program, sampler: ast.Call) -> bool:
    """Whether a sharding sampler leaves a remainder out instead of repeating samples; a local one by its __init__."""
    owner = definition(program, sampler.func)
    init = method(program, owner, "__init__") if isinstance(owner, ast.ClassDef) else None
    made = [each for each in calls(init) if last_name(each.func) == "__init__"] if init is not None else []
    return any(constant(program, given(program, each, "drop_last", 5)) is True for each in [sampler, *made])


def constant(program: Program, node: ast.expr | None, depth: int = 0) -> object:
    """A value that is written out or worked out of such, wherever it comes from; Ellipsis for none, or several."""
    made = origins(program, node) if node and depth < _DEEP else []
    found = [_worked_out(program, each, depth if len(made) < _MANY else _DEEP) for each in made]
    values = {(type(each), each) for each in found}
    return found[0] if len(values) == 1 else ...


def _worked_out(program: Program, made: ast.AST, depth: int) -> Any:
    """The value of a constant, of whole numbers added and multiplied, and of int(), float() and str() of one."""
    match made:
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _WORKED:
            one, other = constant(program, left, depth + 1), constant(program, right, depth + 1)
            return _WORKED[type(op)](one, other) if type(one) is type(other) is int and other else ...
        case ast.Call(func=ast.Name(id="int" | "float" | "str" as name), args=[inner], keywords=[]):
            found = constant(program, inner, depth + 1)
            return _KINDS[name](found) if type(found) in (int, float) else ...
    return ...


@remembered
def training_loaders(program: Program) -> dict[ast.Call, list[Loop]]:
    """The loaders that training steps run over -> the loops that do."""
    found: dict[ast.Call, list[Loop]] = {}
    for loop in step_loops(program):
        for loader in loaders_of(program, loop):
            found.setdefault(loader, []).append(loop)
    return found


@remembered
def evaluation_loaders(program: Program) -> dict[ast.Call, list[Loop]]:
    """The loaders that evaluation alone runs over -> the loops that do."""
    trained, found = training_loaders(program), dict[ast.Call, list[Loop]]()
    for loop in evaluation_loops(program):
        for loader in loaders_of(program, loop):
            if loader not in trained:
                found.setdefault(loader, []).append(loop)
    return found


def datasets(program: Program) -> Iterator[ast.Call]:
    """The calls of torchvision's data sets."""
    yield from _datasets(program)


@remembered
def _datasets(program: Program) -> list[ast.Call]:
    return [call for call in program.calls if _DATASETS.search(qualified(program, call.func))]


@remembered
def optimizers(program: Program) -> list[ast.Call]:
    """The calls of torch's optimizers, and others that take parameters and a rate."""
    found = []
    for call in program.calls:
        name = qualified(program, call.func)
        if (
            ".opt" in f".{name}"
            and re.search(r"(^|\.)optim\.(?!lr_scheduler)\w+$|^(timm|apex)\.opt\w*\.", name)
            and last_name(call.func)[:1].isupper()
        ) or (name.startswith("timm.optim") and last_name(call.func).startswith("create_optimizer")):
            found.append(call)
    return found
