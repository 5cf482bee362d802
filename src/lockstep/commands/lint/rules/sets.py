"""Data sets for evaluation that are the training set after all, told by their names."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import constant, datasets, given, loaders, of_loader, samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.source import Binding
from lockstep.commands.lint.tree import text_of

_EVALUATED = re.compile(r"(^|_|\.)(test|val|valid|validation|dev)")
_CUT = ("random_split", "SubsetRandomSampler", "train_test_split", "KFold", "StratifiedKFold", "Subset")


def misnamed(program: Program) -> Iterator[Hit]:
    """`val_set = CIFAR10(root, train=True)`, where nothing cuts the training set in two."""
    if any(call for name in _CUT for call in program.named.get(name, []) if not _by_rank(call)):
        return
    read = {
        made
        for loader in loaders(program)
        if (node := of_loader(program, loader, "dataset")) is not None
        for made in _whole(program, node)
    }
    training = {
        text_of(binding.value.func)
        for name, binding in _bindings(program)
        if "train" in name.lower() and isinstance(binding.value, ast.Call) and _of_training(program, binding.value)
    }
    for name, binding in _bindings(program):
        call = binding.value
        if not _EVALUATED.search(name.lower()) or "train" in name.lower() or binding.path or call not in read:
            continue
        if isinstance(call, ast.Call) and text_of(call.func) in training and _of_training(program, call):
            yield Hit(call)


def in_hooks(program: Program) -> Iterator[Hit]:
    """A loader of a set that is called the training set, in val_dataloader, or under a name for evaluation."""
    for loader in loaders(program):
        node, source = of_loader(program, loader, "dataset"), program.owner[loader]
        function, parent = function_of(source, loader), source.parents[loader]
        hook = function is not None and function.name in ("val_dataloader", "test_dataloader")
        target = text_of(parent.targets[0]).lower() if isinstance(parent, ast.Assign) else ""
        evaluated = hook or (bool(_EVALUATED.search(target)) and "train" not in target)
        text = last_name(node).lower() if node is not None else ""
        chosen = [each for each in samplers(program, loader) if "Distributed" not in last_name(each.func)]
        named = re.search(r"(^|_)train", text) and not re.search(r"val|test|dev", text)
        if evaluated and named and not chosen:
            yield Hit(loader)


def _by_rank(call: ast.Call) -> bool:
    return last_name(call.func) == "Subset" and "rank" in text_of(call)


def _whole(program: Program, node: ast.AST) -> Iterator[ast.AST]:
    """The calls that made a set, with a rank's share standing for the whole."""
    for made in origins(program, node):
        if isinstance(made, ast.Call) and _by_rank(made) and made.args:
            yield from origins(program, made.args[0])
        else:
            yield made


def _bindings(program: Program) -> Iterator[tuple[str, Binding]]:
    for source in program.sources:
        for names in [*source.names.values(), source.attributes]:
            for name, bindings in names.items():
                yield from ((name, each) for each in bindings if each.kind == "value")


def _of_training(program: Program, call: ast.Call) -> bool:
    """train=True, split="train", or a folder of that name."""
    if definition(program, call.func) is not None:
        return False
    if call in set(datasets(program)) and constant(program, given(program, call, "train", 1)) is True:
        return True
    if any(constant(program, given(program, call, name)) in ("train", "training") for name in ("split", "image_set")):
        return True
    path = text_of(call.args[0]) if call.args and last_name(call.func) == "ImageFolder" else ""
    return bool(re.search(r"\btrain", path)) and not re.search(r"val|test", path)
