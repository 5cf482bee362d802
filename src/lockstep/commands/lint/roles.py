"""What plays which part in a program: loaders, their samplers and data sets, wrapped models, the frameworks in use."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, sites
from lockstep.commands.lint.origins import made_by, origins
from lockstep.commands.lint.places import LOADERS, evaluation_loops, loaders_of, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.source import Loop, function_of

SHARDING = ("DistributedSampler", "RASampler", "DistributedSamplerWrapper", "RepeatAugSampler")
_DATASETS = re.compile(
    r"^torchvision\.datasets\.|^datasets\.(MNIST|FashionMNIST|KMNIST|EMNIST|QMNIST|CIFAR10|CIFAR100|SVHN|STL10|ImageFolder"
    r"|Caltech\w+|Flowers102|Food101|OxfordIIITPet|CelebA|Places365|StanfordCars|FGVCAircraft|DTD|GTSRB|USPS|VOC\w+)$"
)
_POSITIONS = {"dataset": 0, "batch_size": 1, "shuffle": 2, "sampler": 3, "batch_sampler": 4, "num_workers": 5}


def given(program: Program, call: ast.Call, name: str, position: int = -1) -> ast.expr | None:
    """An argument of a call, by name, by place, or from a dictionary that is spread into it."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if 0 <= position < len(call.args) and not any(isinstance(each, ast.Starred) for each in call.args[: position + 1]):
        return call.args[position]
    for keyword in call.keywords:
        if keyword.arg is None and (found := _entry(program, keyword.value, name)) is not None:
            return found
    return None


def _entry(program: Program, spread: ast.expr, name: str) -> ast.expr | None:
    """The value that a dictionary gives to a name: where it is made, and by `.update` after it."""
    found = None
    for made in origins(program, spread):
        if isinstance(made, ast.Dict):
            for key, value in zip(made.keys, made.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    found = value
        elif isinstance(made, ast.Call) and last_name(made.func) == "dict":
            found = next((each.value for each in made.keywords if each.arg == name), found)
    if isinstance(spread, ast.Name):
        for call in program.named.get("update", []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id == spread.id and call.args:
                found = _entry(program, call.args[0], name) or found
    return found


def spread(call: ast.Call) -> bool:
    """Whether a call takes arguments that are not written out."""
    return any(each.arg is None for each in call.keywords) or any(isinstance(each, ast.Starred) for each in call.args)


def of_loader(program: Program, loader: ast.Call, name: str) -> ast.expr | None:
    """An argument of a DataLoader."""
    return given(program, loader, name, _POSITIONS.get(name, -1))


def loaders(program: Program) -> list[ast.Call]:
    """The calls of torch's DataLoader, or a subclass of a library's."""
    found = [call for name in LOADERS for call in program.named.get(name, [])]
    return [each for each in found if definition(program, each.func) is None]


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


def sharding(program: Program, loader: ast.Call) -> list[ast.Call]:
    """The samplers of a loader that give each rank its own part."""
    return [
        each
        for each in samplers(program, loader)
        if last_name(each.func) in SHARDING and definition(program, each.func) is None
    ]


def constant(program: Program, node: ast.expr | None) -> object:
    """A value that is written out, wherever it comes from; Ellipsis where there is none, or more than one."""
    values = [each.value if isinstance(each, ast.Constant) else ... for each in origins(program, node)] if node else []
    return values[0] if len(values) == 1 else ...


def training_loaders(program: Program) -> dict[ast.Call, list[Loop]]:
    """The loaders that training steps run over -> the loops that do."""
    found: dict[ast.Call, list[Loop]] = {}
    for loop in step_loops(program):
        for loader in loaders_of(program, loop):
            found.setdefault(loader, []).append(loop)
    return found


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
    for call in program.calls:
        if _DATASETS.search(qualified(program, call.func)):
            yield call


def library(program: Program, *prefixes: str) -> bool:
    """Whether a file of the program imports one of these libraries."""
    key = ("library", prefixes)
    if key not in program.memo:
        modules = [
            binding.target.partition(":")[0]
            for source in program.sources
            for names in source.names.values()
            for bindings in names.values()
            for binding in bindings
            if binding.kind == "import" and not binding.level
        ]
        program.memo[key] = any(
            each == prefix or each.startswith(f"{prefix}.") for each in modules for prefix in prefixes
        )
    return bool(program.memo[key])


def lightning(program: Program) -> bool:
    """Whether Lightning's Trainer runs the loop (Fabric leaves it to the script)."""
    return library(program, "lightning", "pytorch_lightning") and bool(program.named.get("Trainer"))


def wrapped(program: Program) -> list[ast.Call]:
    """The calls of DistributedDataParallel."""
    if "wrapped" not in program.memo:
        program.memo["wrapped"] = [*program.named.get("DistributedDataParallel", []), *_aliases(program)]
    found = program.memo["wrapped"]
    assert isinstance(found, list)
    return found


def _aliases(program: Program) -> Iterator[ast.Call]:
    for call in program.calls:
        name = qualified(program, call.func)
        if name.endswith(".DistributedDataParallel") and last_name(call.func) != "DistributedDataParallel":
            yield call


def distributed(program: Program) -> bool:
    """Whether the program runs in several processes that train one model."""
    names = (
        "init_process_group",
        "DistributedDataParallel",
        "Accelerator",
        "Fabric",
        "fully_shard",
        "DistributedSampler",
        "init_distributed_mode",
        "deepspeed",
    )
    several = [
        call
        for name in names
        for call in program.named.get(name, [])
        if not _one_device(program, call) and (name != "init_process_group" or starts_group(program))
    ]
    if several or wrapped(program) or library(program, "horovod", "deepspeed"):
        return True
    parts = [call for name in ("Parallel", "auto_model", "initialize", "spawn") for call in program.named.get(name, [])]
    ignite = any(qualified(program, call.func).startswith("ignite.distributed") for call in parts)
    return ignite or _several_devices(program)


def starts_group(program: Program) -> bool:
    """Whether the program comes by init_process_group."""
    return any(comes_by(program, call) for call in program.named.get("init_process_group", []))


def comes_by(program: Program, call: ast.Call) -> bool:
    """Whether a call is not in another file's function that the program never calls."""
    source = program.owner[call]
    function = function_of(source, call)
    return source is program.root or function is None or bool(sites(program, function))


def _one_device(program: Program, call: ast.Call) -> bool:
    """Fabric(devices=1)."""
    return last_name(call.func) == "Fabric" and constant(program, given(program, call, "devices")) in (1, "1")


def _several_devices(program: Program) -> bool:
    return lightning(program) and any(
        ((devices := given(program, call, "devices")) is not None and constant(program, devices) != 1)
        or given(program, call, "strategy") is not None
        for call in program.named.get("Trainer", [])
    )


def wraps(program: Program, node: ast.AST) -> list[ast.Call]:
    """The DistributedDataParallel calls that a value comes from."""
    known = wrapped(program)
    return [each for each in origins(program, node) if isinstance(each, ast.Call) and each in known]


def optimizers(program: Program) -> list[ast.Call]:
    """The calls of torch's optimizers, and others that take parameters and a rate."""
    found = []
    for call in program.calls:
        name = qualified(program, call.func)
        if (
            re.search(r"(^|\.)optim\.(?!lr_scheduler)\w+$|^(timm|apex)\.opt\w*\.", name)
            and last_name(call.func)[:1].isupper()
        ) or (name.startswith("timm.optim") and last_name(call.func).startswith("create_optimizer")):
            found.append(call)
    return found


def reduced(program: Program, node: ast.AST) -> bool:
    """Whether a value goes through, or into, a sum or gathering over the ranks."""
    return bool(
        made_by(program, node, "reduce", "gather", "gather_for_metrics", "all_gather", "all_reduce", "allreduce")
    )
