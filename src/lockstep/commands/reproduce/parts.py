"""The Python beside a recipe: the model, and the data and the optimizer where flags can't say them."""

from typing import Any

from lockstep.commands.reproduce.experiment import Experiment
from lockstep.commands.reproduce.recipe import WEIGHTS, Recipe
from lockstep.errors import UserError

TENSORS = "parts.safetensors"


def module_text(experiment: Experiment, made: Recipe) -> str:
    """The module of parts.

    Raises:
        UserError: where the model has no expression.
    """
    record, script = experiment.record, experiment.script
    source, functions = record["source"], [_model(experiment)]
    if not made.set_by_flags:
        functions.append(_data(experiment))
    if not made.optimizer_by_flags or made.needs_program:
        functions.append(_optimizer(experiment))
    if made.needs_program:
        functions.append(_rates(experiment, made))
    if source["missing"]:
        made.lost.append(f"what {', '.join(source['missing'])} of {script.name} hold: parts.py lacks them")
    body = "\n\n\n".join(functions)
    imports = [name for name in source["modules"] if f"{name}." in body]
    head = [f'"""What {script.name} trains, as the parts of recipe.toml."""', ""]
    if source["local"]:
        head += ["import sys", ""]
    own = source["text"].splitlines()
    if "torch." in body and "torch" not in imports:
        imports.append("torch")
    head += [f"import {name}" for name in sorted(imports) if f"import {name}" not in own]
    if 'TENSORS["' in body:
        head += ["from pathlib import Path", "", "from safetensors.torch import load_file", ""]
        head += [f'TENSORS = load_file(Path(__file__).parent / "{TENSORS}")']
    if source["local"]:
        at = head.index("import sys") + 1
        head[at:at] = ["", f"sys.path.insert(0, {str(script.parent)!r})"]
    taken = f"\n\n# taken from {script.name}\n\n{source['text']}" if source["text"] else ""
    return "\n".join(head).rstrip() + f"{taken}\n\n\n{body}\n"


def _model(experiment: Experiment) -> str:
    model = experiment.record["model"]
    why = model.get("why") or model.get("changes_why")
    if why:
        raise UserError(
            f"{experiment.script.name}: its model can't be written down: {why}",
            "Make it by a class at the top of a module, from numbers, texts and other modules.",
        )
    lines = [f"model = {model['expression']}", *model["changes_expression"]]
    shape = tuple(experiment.steps[0].images.shape[1:])
    if len(shape) != 3:  # a loop of the user's may flatten images before the model
        lines.append(f"model.register_forward_pre_hook(lambda _, args: (args[0].reshape(-1, *{shape}),))")
    return _function("model", "", f"The model; its first weights are in {WEIGHTS}.", [*lines, "return model"])


def _function(name: str, parameters: str, about: str, lines: list[str]) -> str:
    return "\n".join([f"def {name}({parameters}):", f'    """{about}"""', *(f"    {line}".rstrip() for line in lines)])


def _data(experiment: Experiment) -> str:
    train, evaluated = experiment.train, experiment.evaluated or experiment.train
    sets = []
    for loader in (train, evaluated):
        if not loader["dataset"]["expression"]:
            raise UserError(
                f"{experiment.script.name}: its data set can't be written down: {loader['dataset']['why']}",
                "Make it by a class at the top of a module, from numbers, texts and transforms that have names.",
            )
        sets.append(_as_set(loader["dataset"]))
    lines = [f"train = {sets[0]}", f"val = {sets[1]}", "return train, val"]
    functions = [_function("data", "", "The training and the evaluation set.", lines)]
    if any("_labelled(" in each for each in sets):
        functions.insert(0, _LABELLED.format(count=experiment.record["classes"]))
    return "\n\n\n".join(functions)


def _as_set(dataset: dict[str, Any]) -> str:
    shapes = dataset["tensors"]
    if len(shapes) == 2 and len(shapes[0]) == 4:
        return f"{dataset['expression']}.tensors"
    return dataset["expression"] if dataset["labelled"] else f"_labelled({dataset['expression']})"


_LABELLED = '''def _labelled(dataset):
    """The data set, which now says how many classes there are."""
    dataset.classes = [str(number) for number in range({count})]
    return dataset'''


def _optimizer(experiment: Experiment) -> str:
    optimizer = experiment.record["optimizer"]
    if not optimizer["class"]["expression"]:
        raise UserError(
            f"{experiment.script.name}: its optimizer can't be written down: {optimizer['class']['why']}",
            "Use one of torch's, or a class at the top of a module.",
        )
    groups, kind = optimizer["groups"], optimizer["class"]["expression"]
    about = "The optimizer over a model's parameters."
    if len(groups) == 1:
        options = "".join(f", {key}={value}" for key, value in _given(groups[0], optimizer).items() if key != "lr")
        return _function("optimizer", "model, optim, lr", about, [f"return {kind}(model.parameters(), lr=lr{options})"])
    lines = ["groups = ["]
    for group in groups:
        names = f"[model.get_parameter(name) for name in {group['params']!r}]"
        own = [f'"{key}": {value}' for key, value in _given(group, optimizer).items()]
        lines.append("    {" + ", ".join([f'"params": {names}', *own]) + "},")
    return _function("optimizer", "model, optim, lr", about, [*lines, "]", f"return {kind}(groups, lr=lr)"])


def _rates(experiment: Experiment, made: Recipe) -> str:
    """The function of the script's own rates."""
    if made.rates:
        about = "The rate of each epoch, as the script had it; `count` of them."
        return _function("rates", "count", about, [f"found = {made.rates!r}", "return found + found[-1:] * count"])
    if made.table:
        about = "The rates of the first `count` steps, as the script's own function of the step gives them."
        return _function("rates", "count", about, [f"found = {made.table}", "return found + found[-1:] * count"])
    group = experiment.record["optimizer"]["groups"][0]["options"]
    first = group.get("initial_lr", repr(experiment.steps[0].rates[0]))
    lines = [
        "import warnings",
        "",
        "weight = torch.nn.Parameter(torch.zeros(1))",
        f"optimizer = torch.optim.SGD([weight], lr={first}, momentum=0.9)",
        f"scheduler = {made.scheduler}",
        "found = []",
        "with warnings.catch_warnings():",
        '    warnings.simplefilter("ignore")  # it may not be made for more steps than the script takes',
        "    while len(found) < count:",
        "        if found:",
        "            optimizer.step()",
        "            scheduler.step()",
        '        found.append(optimizer.param_groups[0]["lr"])',
        "return found",
    ]
    return _function("rates", "count", "The rates of the first `count` steps, by the script's own scheduler.", lines)


def _given(group: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, str]:
    """The options of a group that its optimizer would not have by itself."""
    usual = optimizer["usual"]
    return {key: value for key, value in group["options"].items() if usual.get(key, value) != value or key == "lr"}
