"""What of a recipe gives way to a changed flag: `train cifar10 --optimizer adam` keeps neither Nesterov nor SGD's rate.

Values that were typed stay as they are. Where two of those don't go together the config refuses them.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lockstep.config import Config
from lockstep.config.conflicts import Conflict
from lockstep.config.data import decode_size_for
from lockstep.config.fields import flags_of, values_of, with_values

# optimizer -> a rate to begin with, for batches of 64 to 256, and the weight decay that is usual with it
USUAL = {
    "sgd": (0.05, 5e-4),
    "adam": (1e-3, 0.0),
    "adamw": (1e-3, 0.05),
    "adadelta": (1.0, 0.0),
    "muon-sgd": (0.24, 0.004),
}
_OWN_MODELS = ("digits_net", "mlp", "mnist_net", "speed_net")  # and *_cifar: nobody published weights of them
_LIKE_SGD = ("timm:sgd", "timm:momentum", "timm:nesterov")
_FLAGS = flags_of(Config)
_DEFAULTS = {name: flag.default for name, flag in _FLAGS.items()}

_Values = Mapping[str, Any]  # by field
_Change = tuple[str, dict[str, Any]]  # because of a flag: other values


def changed(base: Config, typed: _Values) -> tuple[dict[str, Any], list[str]]:
    """The values that `base` gets by those that were typed: these, and what gives way to them, with a line on each.
    Raises UserError for typed values that don't go together.
    """
    was, causes = values_of(base), dict[str, str]()
    now = was | dict(typed)

    def give_way(because: str, values: _Values) -> None:
        new = {name: value for name, value in values.items() if name not in typed and value != now[name]}
        now.update(new)
        causes.update(dict.fromkeys(new, because) | causes)

    for fit in (_to_optimizer, _to_fresh_weights, _to_schedule, _to_epochs, _to_sizes):
        for because, values in fit(was, now):
            give_way(because, values)
    while True:
        made = {name: value for name, value in now.items() if name in typed or value != was[name]}
        try:
            with_values(base, made)
        except Conflict as conflict:
            loose = [flag for flag in conflict.flags if flag.field not in typed and now[flag.field] != flag.default]
            if not loose:
                raise
            others = [flag.shown(now[flag.field]) for flag in conflict.flags if flag is not loose[0]]
            give_way(" with ".join(others), {loose[0].field: loose[0].default})
        else:
            return made, _lines(was, now, causes)


def _lines(was: _Values, now: _Values, causes: Mapping[str, str]) -> list[str]:
    lines = []
    for because in dict.fromkeys(causes.values()):
        also = []
        for name in (name for name, cause in causes.items() if cause == because):
            before = "" if isinstance(now[name], bool) else f" (was {_FLAGS[name].plainly(was[name]) or 'none'})"
            also.append(f"{_FLAGS[name].shown(now[name])}{before}")
        lines.append(f"{because} also sets {', '.join(also)}")
    if now["optimizer"] != was["optimizer"] and _usual(now["optimizer"]) is None and now["lr"] == was["lr"]:
        lines.append(f"--lr {was['lr']:g} was chosen for --optimizer {was['optimizer']}")
    return lines


def flags_for(config: Config, base: Config, hidden: Collection[str] = ()) -> list[list[str]]:
    """The flags that make `config` of `base`, each with its value: what differs, and what would give way to that.

    `hidden`: fields that are no flags.
    """
    values, typed = values_of(config), dict[str, Any]()
    fields = [name for name, flag in _FLAGS.items() if flag.arg.flag and name not in hidden]
    while True:
        made = values_of(with_values(base, changed(base, typed)[0]))
        missing = {name: values[name] for name in fields if values[name] != made[name]}
        if not missing:
            return [_FLAGS[name].words(values[name]) for name in fields if name in typed]
        typed |= missing


def _usual(optimizer: str) -> tuple[float, float] | None:
    """An optimizer's usual rate and weight decay; None for the user's own."""
    if optimizer.startswith("timm:"):
        return USUAL["sgd" if optimizer.startswith(_LIKE_SGD) else "adamw"]
    return USUAL.get(optimizer)


def _to_optimizer(was: _Values, now: _Values) -> Iterator[_Change]:
    """Rates differ by orders of magnitude between optimizers. A recipe's smaller rate, as for fine-tuning, stays so."""
    if now["optimizer"] != was["optimizer"]:
        values = {"momentum": 0.9, "nesterov": False}
        if usual := _usual(now["optimizer"]):
            before = _usual(was["optimizer"]) or (was["lr"], 0.0)
            lr = _rounded(usual[0] * min(1.0, was["lr"] / before[0]))
            head_lr = _rounded(was["head_lr"] * lr / was["lr"])
            values |= {"lr": lr, "weight_decay": usual[1], "head_lr": head_lr}
        yield f"--optimizer {now['optimizer']}", values


def _to_fresh_weights(was: _Values, now: _Values) -> Iterator[_Change]:
    """Small rates, frozen layers, few epochs and the like are for weights that have learned something."""
    model = now["model"]
    unpublished = model in _OWN_MODELS or model.endswith("_cifar") or ":" in model
    others = unpublished and model != was["model"] and now["init"] == was["init"]
    if was["init"] and (not now["init"] or others):
        fresh = ("init", "adapt_init", "freeze", "freeze_until", "layer_decay", "head_lr")
        usual = _usual(now["optimizer"]) or (now["lr"], 0.0)
        because = f"--model {model}" if now["init"] else "--init none"
        epochs = 3 * was["epochs"]  # photos on 4 x 20 digits: 78.5 % in 20 epochs, 85.5 in 60
        yield because, {**{name: _DEFAULTS[name] for name in fresh}, "lr": usual[0], "epochs": epochs}


def _to_schedule(was: _Values, now: _Values) -> Iterator[_Change]:
    schedule, epochs = now["schedule"], now["epochs"]
    if schedule != was["schedule"]:
        values = {name: _DEFAULTS[name] for name in ("milestones", "step_epochs", "gamma")}
        if schedule == "multistep":
            values["milestones"] = (epochs / 2, epochs * 3 / 4)
        elif schedule == "step":
            values["step_epochs"] = _rounded(epochs / 3)
        elif schedule == "one-cycle":  # which rises by itself
            values["warmup_epochs"] = 0.0
        yield f"--schedule {schedule}", values


def _to_epochs(was: _Values, now: _Values) -> Iterator[_Change]:
    epochs = now["epochs"]
    if epochs != was["epochs"]:
        values = {"warmup_epochs": min(now["warmup_epochs"], epochs / 2)}
        if now["schedule"] == was["schedule"]:
            values["milestones"] = tuple(_rounded(each * epochs / was["epochs"]) for each in was["milestones"])
        yield f"--epochs {epochs}", values


def follows_epochs(saved: Mapping[str, Any], now: Config) -> list[str]:
    """What differs between a saved config's values, nested, and this one as `--epochs` makes it differ: paths."""
    after, optim = values_of(now), saved.get("optim", {})
    names = ("warmup_epochs", "milestones", "schedule")
    before = {name: optim.get(name, after[name]) for name in names} | {"epochs": saved.get("epochs", now.epochs)}
    before["milestones"] = tuple(before["milestones"])

    def made(one: _Values, epochs: int) -> _Values:
        return next((values for _, values in _to_epochs(one, {**one, "epochs": epochs})), {})

    there, back = made(before, now.epochs), made(after, before["epochs"])
    return [f"optim.{name}" for name in there if there[name] == after[name] or back[name] == before[name]]


def _to_sizes(was: _Values, now: _Values) -> Iterator[_Change]:
    side, batch = now["image_size"], now["batch_size"]
    if side != was["image_size"] and was["image_size"]:
        train = now["train_size"]
        if train == was["train_size"]:
            train = round(train * side / was["image_size"])
        decode = decode_size_for(max(side or 224, train)) if was["decode_size"] else 0
        yield f"--image-size {side}", {"train_size": train, "decode_size": decode}
    if batch % now["aug_repeats"]:
        repeats = next(count for count in range(min(batch, now["aug_repeats"]), 0, -1) if batch % count == 0)
        yield f"--batch-size {batch}", {"aug_repeats": repeats}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
