"""An experiment as a config of Lockstep's, and what that can't say or should not."""

import ast
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.commands.reproduce.experiment import Experiment
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Precision
from lockstep.config.files import to_toml
from lockstep.config.recipes import recipe
from lockstep.training import schedules

PARTS = "parts"  # the module beside the recipe
WEIGHTS = "initial.safetensors"
_SETS = {
    "torchvision.datasets.mnist.MNIST": ("mnist", "MNIST/raw"),
    "torchvision.datasets.mnist.FashionMNIST": ("fashion-mnist", "FashionMNIST/raw"),
    "torchvision.datasets.cifar.CIFAR10": ("cifar10", "cifar-10-batches-bin"),
    "torchvision.datasets.cifar.CIFAR100": ("cifar100", "cifar-100-binary"),
}
# torch's optimizers that a name stands for, and what of theirs a flag says
_OPTIMIZERS = {
    "torch.optim.sgd.SGD": ("sgd", {"lr", "momentum", "weight_decay", "nesterov"}),
    "torch.optim.adam.Adam": ("adam", {"lr", "weight_decay"}),
    "torch.optim.adamw.AdamW": ("adamw", {"lr", "weight_decay"}),
    "torch.optim.adadelta.Adadelta": ("adadelta", {"lr", "weight_decay"}),
}
_HOW = {"foreach", "fused", "capturable", "differentiable", "maximize", "initial_lr", "decoupled_weight_decay"}
_CLOSE = 1e-6


@dataclass
class Recipe:
    """What is written. `missing`: what is not taken over; `different`: what is so on purpose."""

    config: Config
    set_by_flags: bool = False  # else the module of parts has the data
    optimizer_by_flags: bool = False
    rates: list[float] = field(default_factory=list)  # by epoch, where no schedule of ours has them
    scheduler: str = ""  # the script's, where it is stepped with each step: an expression of `optimizer`
    table: str = ""  # or the rates of all steps as an expression
    random_pixels: bool = False  # transforms draw, so that no pixels can be compared
    missing: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @property
    def needs_program(self) -> bool:
        """Whether flags can't say it, so that a program says it."""
        return bool(self.rates or self.scheduler or self.table)


def recipe_of(experiment: Experiment) -> Recipe:
    """The recipe of an experiment."""
    draft = Recipe(Config())
    data, root = _data(experiment, draft)
    optim = _optim(experiment, draft)
    record = experiment.record
    epochs = max(1, experiment.train["passes"])
    if record["end"] != "done":
        draft.missing.append(f"the number of epochs: the script was stopped in epoch {epochs} ({record['end']})")
    draft.config = Config(
        epochs=epochs,
        batch_size=experiment.batch_size,
        accumulate=experiment.accumulate,
        seed=record["seed"] or 0,
        precision=precision(experiment, draft.different, draft.missing),
        data=data,
        model=ModelConfig(
            model=f"{PARTS}:model",
            init=WEIGHTS,
            batch_norm=_batch_norm(experiment, draft),
            **model_fields(experiment, draft.different),
        ),
        optim=optim,
        execution=Execution(data_dir=root),
    )
    _schedule(experiment, draft)
    not_seen_by_a_recipe(experiment, draft.missing)
    return draft


def _batch_norm(experiment: Experiment, draft: Recipe) -> str:
    kinds = set(experiment.record["batch_norm"])
    if experiment.world == 1 or not kinds or kinds == {"SyncBatchNorm"}:
        return "auto"
    draft.different.append(
        f"batch norm's statistics stay over {experiment.per_pass} samples, as on each of the script's processes, by "
        f"--batch-norm groups:{experiment.per_pass}: now on any number of processes. Its running statistics are those "
        "of all processes, and not process 0's alone"
    )
    return f"groups:{experiment.per_pass}"


def _data(experiment: Experiment, draft: Recipe) -> tuple[DataConfig, str]:
    train, evaluated = experiment.train, experiment.evaluated
    drop_last = train["drop_last"]
    steps, others = train["transforms"], evaluated["transforms"] if evaluated else train["transforms"]
    draft.random_pixels = steps is None or any("Random" in each["name"] or "Jitter" in each["name"] for each in steps)
    name, place = _SETS.get(train["dataset"]["kind"], ("", ""))
    root = Path(train["dataset"]["root"])
    same = evaluated is None or evaluated["dataset"]["kind"] == train["dataset"]["kind"]
    fields = _pixels(steps, others)
    if name and same and train["dataset"]["train"] and fields is not None and (root / place).is_dir():
        draft.set_by_flags = True
        return DataConfig(dataset=name, drop_last=drop_last, **fields), str(root)
    if draft.random_pixels:
        draft.different.append(
            "the data set's random transforms draw by (seed, epoch, sample): the same on any number of processes"
        )
    if evaluated is None:
        draft.missing.append("evaluation: the script has none; the recipe evaluates on the training set")
    return DataConfig(dataset=f"{PARTS}:data", drop_last=drop_last), ""


def _pixels(train: list[dict[str, Any]] | None, others: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The fields of a config that do what these transforms do; None where there are no such."""
    if train is None or others is None:
        return None
    found: dict[str, Any] = {"mean": (0.0,), "std": (1.0,)}
    plain, queue = [each for each in train if each["name"] in ("ToTensor", "Normalize")], list(train)
    if plain != others or not queue:
        return None
    if queue[0]["name"] == "RandomCrop":
        crop = queue.pop(0)["values"]
        fill = {"constant": "zero", "reflect": "reflect"}.get(crop["padding_mode"])
        if not isinstance(crop["padding"], int) or crop["fill"] or fill is None:
            return None
        found |= {"crop_padding": crop["padding"], "crop_fill": fill}
    if queue and queue[0]["name"] == "RandomHorizontalFlip":
        if queue.pop(0)["values"]["p"] != 0.5:
            return None
        found["flip"] = True
    if [each["name"] for each in queue] == ["ToTensor", "Normalize"]:
        values = queue[1]["values"]
        return found | {"mean": tuple(values["mean"]), "std": tuple(values["std"])}
    return found if [each["name"] for each in queue] == ["ToTensor"] else None


def _optim(experiment: Experiment, draft: Recipe) -> OptimConfig:
    optimizer, rate = experiment.record["optimizer"], experiment.steps[0].rates[0]
    name, known = _OPTIMIZERS.get(optimizer["kind"], ("", set()))
    groups = [group["options"] for group in optimizer["groups"]]
    options = {key: _literal(value) for key, value in groups[0].items()}
    usual = {key: _literal(value) for key, value in optimizer["usual"].items()}
    strange = [key for key in options if key not in known | _HOW and options[key] != usual.get(key)]
    common: dict[str, Any] = {"lr": rate, "schedule": "constant", "base_batch_size": experiment.batch_size}
    clipped = experiment.record["clips"]
    norms = [most for kind, most, norm in clipped if kind == "clip_grad_norm_" and norm == 2.0]
    if len(norms) == 1 and len(clipped) == 1:
        common["clip_norm"] = norms[0]
    elif clipped:
        draft.missing.append(f"clipping by {', '.join(kind for kind, _, _ in clipped)}")
    loss = experiment.record["loss"]
    common["label_smoothing"] = loss["smoothing"]
    if loss["name"] == "binary_cross_entropy_with_logits":
        common["loss"] = "bce"
    if loss["name"] == "nll_loss":
        if experiment.record["log_probabilities"]:
            draft.different.append(
                "the loss is the cross-entropy, which of log-probabilities is the NLL: their log-softmax is themselves"
            )
        else:
            draft.missing.append("nll_loss of outputs that are no log-probabilities")
    if experiment.weight is not None:
        common["class_weights"] = ",".join(repr(float(each)) for each in experiment.weight)
    if name and not strange and len(groups) == 1:
        draft.optimizer_by_flags = True
        momentum = {key: options[key] for key in ("momentum", "nesterov") if key in options}
        return OptimConfig(
            optimizer=name, weight_decay=float(options["weight_decay"]), decay_norms="yes", **(common | momentum)
        )
    return OptimConfig(optimizer=f"{PARTS}:optimizer", **common)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _schedule(experiment: Experiment, draft: Recipe) -> None:
    """Find the schedule whose rates were seen, or keep them as a table."""
    rates, config = experiment.rates, draft.config
    scheduler = experiment.record["scheduler"]
    if scheduler.get("momentum"):
        draft.missing.append(f"{scheduler['name']} moves the momentum as well; here it stays")
    if scheduler.get("each_step") or len({step.rates[0] for step in experiment.steps}) > 1:
        draft.scheduler, draft.table = scheduler.get("expression", ""), scheduler.get("table", "")
        if not draft.needs_program:
            why = f" ({scheduler['why']})" if scheduler.get("why") else ""
            draft.missing.append(f"the schedule: it moves the rate within an epoch{why}; the first rate is kept")
        return
    epochs, changes = config.epochs, [e for e in range(1, len(rates)) if rates[e] != rates[e - 1]]
    if not changes:
        return
    per_epoch = experiment.train["length"]
    gamma = rates[changes[0]] / rates[changes[0] - 1]
    for fields in (
        {"schedule": "step", "step_epochs": float(changes[0]), "gamma": round(gamma, 12)},
        {"schedule": "multistep", "milestones": tuple(map(float, changes)), "gamma": round(gamma, 12)},
    ):
        optim = dataclasses.replace(config.optim, **fields)  # type: ignore[arg-type]
        ours = [optim.lr * schedules.factor(optim, e * per_epoch, per_epoch, epochs) for e in range(len(rates))]
        if all(math.isclose(a, b, rel_tol=_CLOSE) for a, b in zip(ours, rates, strict=True)):
            draft.config = dataclasses.replace(config, optim=optim)
            return
    draft.rates = rates


def as_toml(config: Config, about: list[str]) -> str:
    """The config as a file: what differs from the recipe that it stands on, in tables."""
    usual, found = recipe(config.recipe).to_dict(), dict[str, Any]()
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            inner = {key: each for key, each in value.items() if each != usual[name][key]}
            found |= {name: inner} if inner else {}
        elif value != usual[name] or name in ("recipe", "epochs", "batch_size", "seed"):
            found[name] = value
    return "".join(f"# {line}\n" for line in about) + to_toml(SimpleNamespace(to_dict=lambda: found))


_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def precision(experiment: Experiment, different: list[str], missing: list[str]) -> Precision:
    """The precision of an autocast that was seen."""
    record = experiment.record
    found: Precision = _PRECISIONS.get(record["autocast"], "fp32")
    if record["cuda"] and found != "fp32":
        different.append(
            f"autocast: both columns are float32, as there is no GPU here; the recipe has --precision {found}"
        )
    if record["skipped"]:
        missing.append(f"{record['skipped']} steps that the gradient scaler left out are not among those compared")
    return found


def model_fields(experiment: Experiment, different: list[str]) -> dict[str, Any]:
    """How the model runs: NHWC, compiled."""
    record, found = experiment.record, dict[str, Any]()
    if record["channels_last"]:
        found["channels_last"] = True
    if record["compiled"]:
        mode = record["compiled"] if record["compiled"] in ("reduce-overhead", "max-autotune") else "default"
        found |= {"compile": True, "compile_mode": mode}
        different.append("torch.compile: both columns run without it; the recipe has --compile")
    return found


def not_seen_by_a_recipe(experiment: Experiment, missing: list[str]) -> None:
    """Say what lies between the loader and the model, and where another model is evaluated than is trained."""
    evaluated = experiment.record["evaluated"]
    if "copy" in evaluated:
        missing.append(
            "a copy of the model is evaluated, as moving averages of weights are: --ema gives the recipe one"
        )
    elif evaluated == ["another"]:
        missing.append("the script evaluates another model than the one that it trains; the recipe evaluates its own")
    for what, at in experiment.record["changed"].items():
        where = f" ({at})" if at else ""
        missing.append(
            f"{what} are changed between the loader and the {'model' if what == 'images' else 'loss'}{where}"
        )
