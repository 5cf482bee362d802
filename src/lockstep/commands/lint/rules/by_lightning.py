"""What rules look for in Lightning's modules and Trainer, which runs the loops that other scripts write out."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import is_reduction
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_rank
from lockstep.commands.lint.roles import constant, given, of_loader, samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.several import distributed, lightning
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk

_EVALUATED = {
    "validation_step": ("fit", "validate"),
    "on_validation_epoch_end": ("fit", "validate"),
    "test_step": ("test",),
    "on_test_epoch_end": ("test",),
}
_METRIC = re.compile(r"Accuracy|Metric|F1|AUROC|Precision|Recall|MeanSquared|ConfusionMatrix")


def several(program: Program) -> bool:
    """Whether Lightning trains on several devices."""
    return lightning(program) and distributed(program)


def runs(program: Program, *names: str) -> list[ast.Call]:
    """The calls of a Trainer's methods that run on several devices, as far as the text says how many they are."""
    found = []
    for name in names:
        for call in program.named.get(name, []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            made = [each for each in origins(program, owner) if isinstance(each, ast.Call)] if owner else []
            trainers = [each for each in made if last_name(each.func) == "Trainer"]
            if owner is not None and (
                any(constant(program, given(program, each, "devices")) not in (1, "1") for each in trainers)
                or (not made and "trainer" in text_of(owner).lower())
            ):
                found.append(call)
    return found


def own_sampler(program: Program) -> bool:
    """Whether a Trainer is told to leave samplers alone."""
    return any(
        constant(program, given(program, call, name)) is False
        for call in program.named.get("Trainer", [])
        for name in ("use_distributed_sampler", "replace_sampler_ddp")
    )


def logs(program: Program) -> Iterator[tuple[ast.Call, Function]]:
    """The calls of self.log in a module's hooks, and the hook."""
    for call in [*program.named.get("log", []), *program.named.get("log_dict", [])]:
        source = program.owner[call]
        function = function_of(source, call)
        mine = isinstance(call.func, ast.Attribute) and text_of(call.func.value) == "self"
        if mine and function is not None and class_of(source, call) is not None:
            yield call, function


def unsynced(program: Program) -> Iterator[ast.Call]:
    """self.log of an epoch's number without sync_dist, on several devices."""
    for call, function in logs(program) if several(program) else []:
        in_training = function.name == "training_step"
        if in_training and constant(program, given(program, call, "on_epoch")) is not True:
            continue  # a step's number, of the rank that logs
        if in_training or runs(program, *_EVALUATED.get(function.name, ())):
            synced = given(program, call, "sync_dist")
            value = given(program, call, "value", 1)
            metric = value is None or torchmetric(program, value)
            if not metric and (synced is None or constant(program, synced) is False):
                yield call


def _makes_metric(program: Program, made: ast.AST) -> bool:
    """Accuracy(...), or what a lambda makes by that."""
    if not isinstance(made, ast.Call):
        return False
    if _METRIC.search(last_name(made.func)):
        return True
    known = origins(program, made.func) if isinstance(made.func, ast.Name) else []
    return any(isinstance(each, ast.Lambda) and _makes_metric(program, each.body) for each in known)


def torchmetric(program: Program, value: ast.expr) -> bool:
    """Whether a value is a torchmetrics object, or computed by one: those reduce by themselves."""

    def metric(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return any(_makes_metric(program, each) for each in origins(program, node))
        return is_reduction(node)

    return depends(program, value, metric)


def watched(program: Program) -> Iterator[Hit]:
    """ModelCheckpoint or EarlyStopping that goes by an unsynced number."""
    names = {constant(program, given(program, call, "name", 0)) for call in unsynced(program)}
    for call in [*program.named.get("ModelCheckpoint", []), *program.named.get("EarlyStopping", [])]:
        monitor = given(program, call, "monitor", 0 if last_name(call.func) == "EarlyStopping" else -1)
        if monitor is not None and constant(program, monitor) in names - {...}:
            yield Hit(call, f"monitor={text_of(monitor)}, logged without sync_dist")


def uneven_means(program: Program) -> Iterator[Hit]:
    """sync_dist=True of batches' means, over parts that a script cuts by the rank: they are of unequal sizes."""
    parts = [
        call
        for call in program.named.get("Subset", [])
        if (chosen := given(program, call, "indices", 1)) and any(is_rank(each) for each in walk(chosen))
    ]
    if not (several(program) and own_sampler(program) and parts):
        return
    for call, function in logs(program):
        value = given(program, call, "value", 1)
        synced = constant(program, given(program, call, "sync_dist")) is True
        means = value is not None and synced and not torchmetric(program, value)
        if means and function.name in ("validation_step", "test_step"):
            yield Hit(call, "of parts that differ in size")


def padded(program: Program) -> Iterator[Hit]:
    """A validation loader that Lightning gives a padding sampler to, unless the devices divide a known set."""
    if several(program) and not own_sampler(program):
        for loader, _ in validated(program):
            if not samplers(program, loader) and known_size(program, loader) is None:
                yield Hit(loader, "Lightning's own sampler repeats samples")


def validated(program: Program) -> Iterator[tuple[ast.Call, str]]:
    """The loaders that a Trainer validates or tests by, and the method that runs it or the hook that makes them."""
    hooks = {"val_dataloader": ("fit", "validate"), "test_dataloader": ("test",)}
    for name, used in hooks.items():
        for function in program.methods.get(name, []) if runs(program, *used) else []:
            for call in walk(function):
                if isinstance(call, ast.Call) and last_name(call.func) == "DataLoader":
                    yield call, name
    for run in runs(program, "fit", "validate", "test"):
        name = last_name(run.func)
        place = "val_dataloaders" if name == "fit" else "dataloaders"
        loader = given(program, run, place, 2 if name == "fit" else 1)
        for made in origins(program, loader) if loader is not None else []:
            if isinstance(made, ast.Call) and last_name(made.func) == "DataLoader":
                yield made, name


_SIZES = {"MNIST": 10_000, "FashionMNIST": 10_000, "KMNIST": 10_000, "CIFAR10": 10_000, "CIFAR100": 10_000}


def known_size(program: Program, loader: ast.Call) -> int | None:
    """How many samples of a test set that is known each device gets, where their number divides it; else None."""
    node = of_loader(program, loader, "dataset")
    sets = [last_name(each.func) for each in origins(program, node) if isinstance(each, ast.Call)] if node else []
    counts = [constant(program, given(program, each, "devices")) for each in program.named.get("Trainer", [])]
    shares = {
        _SIZES[name] / count if name in _SIZES and isinstance(count, int) and count > 0 else 0.5
        for name in sets
        for count in counts
    }
    only = shares.pop() if len(shares) == 1 else 0.5
    return int(only) if only.is_integer() else None


def waits_in_steps(program: Program) -> Iterator[Hit]:
    """.item() or print of the loss in training_step, under no condition."""
    for function in program.methods.get("training_step", []) if lightning(program) else []:
        for call in walk(function):
            if not isinstance(call, ast.Call) or any(
                isinstance(each, ast.If | ast.IfExp) for each in above(program.owner[call], call)
            ):
                continue
            name, text = last_name(call.func), text_of(call)
            asked = name in ("item", "cpu", "tolist") and isinstance(call.func, ast.Attribute) and "loss" in text
            if asked or (name == "print" and isinstance(call.func, ast.Name) and re.search(r"\bloss\b", text)):
                yield Hit(call)
                break


def unused(program: Program) -> Iterator[Hit]:
    """A strategy with find_unused_parameters for modules whose training step takes one way."""
    modules = [
        definition_of
        for steps in program.methods.get("training_step", [])
        if (definition_of := class_of(program.owner[steps], steps)) is not None
    ]
    if not modules or not lightning(program) or not all(_straight_step(program, each) for each in modules):
        return
    for call in program.named.get("Trainer", []):
        strategy = given(program, call, "strategy")
        if strategy is not None and str(constant(program, strategy)).endswith("find_unused_parameters_true"):
            yield Hit(strategy)
        for made in origins(program, strategy) if strategy is not None else []:
            value = given(program, made, "find_unused_parameters") if isinstance(made, ast.Call) else None
            if value is not None and constant(program, value) is True:
                yield Hit(value)


def _straight_step(program: Program, module: ast.ClassDef) -> bool:
    """Whether training_step and forward have no choice to make, and one optimizer: all is used in each step."""
    if "automatic_optimization" in text_of(module) or any(definition(program, base) for base in module.bases):
        return False
    choices = (ast.If, ast.IfExp, ast.While, ast.For, ast.Try, ast.Match, ast.ListComp, ast.With)
    parts = [method(program, module, name) for name in ("training_step", "forward")]
    return not any(isinstance(each, choices) for part in parts if part is not None for each in walk(part))
