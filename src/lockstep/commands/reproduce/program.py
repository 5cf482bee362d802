"""The Python beside a recipe: the model, and the data, the optimizer and the schedule where flags can't say them."""

from typing import Any

from lockstep.commands.reproduce.experiment import Experiment
from lockstep.commands.reproduce.recipe import WEIGHTS, Recipe
from lockstep.errors import UserError

TENSORS = "parts.safetensors"


def module_text(experiment: Experiment, draft: Recipe) -> str:
    """The module of parts.

    Raises:
        UserError: where the model has no expression.
    """
    record, script = experiment.record, experiment.script
    source, functions = record["source"], [_model(experiment)]
    if not draft.set_by_flags:
        functions.append(_data(experiment))
    if not draft.optimizer_by_flags or draft.needs_program:
        functions.append(_optimizer(experiment))
    if draft.needs_program:
        functions.append(_rates(experiment, draft))
    if source["missing"]:
        draft.missing.append(f"what {', '.join(source['missing'])} of {script.name} hold: parts.py lacks them")
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
    loaders = [experiment.train, experiment.evaluated or experiment.train]
    pairs = all(len(each["dataset"]["tensors"]) == 2 and len(each["dataset"]["tensors"][0]) == 4 for each in loaders)
    sets = []
    for dataset in (each["dataset"] for each in loaders):
        if not dataset["expression"]:
            raise UserError(
                f"{experiment.script.name}: its data set can't be written down: {dataset['why']}",
                "Make it by a class at the top of a module, from numbers, texts and transforms that have names.",
            )
        labelled = dataset["expression"] if dataset["labelled"] else f"_labelled({dataset['expression']})"
        sets.append(f"{dataset['expression']}.tensors" if pairs else labelled)
    lines = [f"train = {sets[0]}", f"val = {sets[1]}", "return train, val"]
    functions = [_function("data", "", "The training and the evaluation set.", lines)]
    if any("_labelled(" in each for each in sets):
        functions.insert(0, _LABELLED.format(count=experiment.record["classes"]))
    return "\n\n\n".join(functions)


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


def _rates(experiment: Experiment, draft: Recipe) -> str:
    """The function of the script's own rates."""
    if draft.rates:
        about = "The rate of each epoch, as the script had it; `count` of them."
        return _function("rates", "count", about, [f"found = {draft.rates!r}", "return found + found[-1:] * count"])
    if draft.table:
        about = "The rates of the first `count` steps, as the script's own function of the step gives them."
        return _function("rates", "count", about, [f"found = {draft.table}", "return found + found[-1:] * count"])
    group = experiment.record["optimizer"]["groups"][0]["options"]
    first = group.get("initial_lr", repr(experiment.steps[0].rates[0]))
    lines = [
        "import warnings",
        "",
        "weight = torch.nn.Parameter(torch.zeros(1))",
        f"optimizer = torch.optim.SGD([weight], lr={first}, momentum=0.9)",
        f"scheduler = {draft.scheduler}",
        "found = []",
        "with warnings.catch_warnings():",
        '    warnings.simplefilter("ignore")  # it may not be draft for more steps than the script takes',
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


_TEXT = '''"""What {name} trains, with its own schedule: `python train.py`, on any number of processes."""

import parts
{torch}import torch.nn.functional as F
from safetensors.torch import load_file

import lockstep as ls

EPOCHS, LR = {epochs}, {lr!r}


def main(world):
    train, val = ls.loaders(
        {dataset}, world, batch_size={batch_size}, accumulate={accumulate}, seed={seed}{loading}
    )
    model = parts.model()
    model.load_state_dict(load_file("{weights}"))
    model = model.to({where})
    model = ls.parallelize(model, world, batch_norm="{batch_norm}")
{compiled}    optimizer = parts.optimizer(model, None, LR)
    rates = parts.rates({count})

    def schedule(samples):
        """The rate after so many samples, as a part of LR."""
        return rates[min({position}, len(rates) - 1)] / LR

    step = ls.TrainStep(
        model, {loss}, optimizer, precision="{precision}", clip_norm={clip_norm!r}, schedule=schedule, seed={seed}
    )
    for number, epoch in enumerate(train.epochs(EPOCHS), start=1):
        for batch in epoch:
            step(batch)
        metrics = ls.evaluate(model, val, world)
        world.print(f"epoch {{number}}: {{metrics}}")


if __name__ == "__main__":
    ls.launch(main)
'''


_FIELDS = ("crop_padding", "crop_fill", "flip", "mean", "std", "drop_last")


def program_text(experiment: Experiment, draft: Recipe) -> str:
    """The program."""
    config, usual = draft.config, type(draft.config.data)()
    loading = {name: getattr(config.data, name) for name in _FIELDS}
    loading = {name: value for name, value in loading.items() if value != getattr(usual, name)}
    if config.execution.data_dir:
        loading["data_dir"] = config.execution.data_dir
    if config.model.batch_norm != "auto":
        loading["batch_norm"] = config.model.batch_norm
    loss = "F.cross_entropy"
    if config.optim.label_smoothing:
        loss = (
            f"lambda outputs, labels: F.cross_entropy(outputs, labels, label_smoothing={config.optim.label_smoothing})"
        )
    if config.optim.loss == "bce":
        draft.missing.append(
            "the loss, in train.py: give TrainStep the script's binary cross-entropy of one-hot labels"
        )
    if config.optim.class_weights != "none":
        draft.missing.append("class weights, in train.py: give TrainStep a torch.nn.CrossEntropyLoss(weight=...)")
    by_epoch = bool(draft.rates)
    return _TEXT.format(
        where="world.device" + (", memory_format=torch.channels_last" if config.model.channels_last else ""),
        compiled=f'    model.compile(mode="{config.model.compile_mode}")\n' if config.model.compile else "",
        name=experiment.script.name,
        torch="import torch\n" if config.model.channels_last else "",
        epochs=config.epochs,
        lr=config.optim.lr,
        dataset=repr(config.data.dataset) if draft.set_by_flags else "parts.data()",
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seed=config.seed,
        loading="".join(f", {name}={value!r}" for name, value in loading.items()),
        weights=WEIGHTS,
        batch_norm=config.model.batch_norm,
        count="EPOCHS" if by_epoch else "EPOCHS * len(train)",
        position="samples // train.order.samples_per_epoch" if by_epoch else "-(-samples // train.order.batch_size)",
        loss=loss,
        precision=config.precision,
        clip_norm=config.optim.clip_norm,
    )
