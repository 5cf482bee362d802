"""The program beside a recipe whose schedule no flag says: the same experiment on Lockstep's public library."""

from lockstep.commands.reproduce.experiment import Experiment
from lockstep.commands.reproduce.recipe import WEIGHTS, Recipe

_TEXT = '''"""What {name} trains, with its own schedule: `python train.py`, on any number of processes."""

import parts
{torch}import torch.nn.functional as F
from safetensors.torch import load_file{averaging}

import lockstep as ls

EPOCHS, LR = {epochs}, {lr!r}


def main(world):
    train, val = ls.loaders(
        {dataset}, world, batch_size={batch_size}, accumulate={accumulate}, seed={seed}{loading}
    )
    model = parts.model()
    model.load_state_dict(load_file("{weights}"))
    model = model.to({where})
{average}    model = ls.parallelize(model, world, batch_norm="{batch_norm}")
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
{averaged}        metrics = ls.evaluate({evaluated}, val, world)
        world.print(f"epoch {{number}}: {{metrics}}")


if __name__ == "__main__":
    ls.launch(main)
'''


def _written(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


_AVERAGING = "\nfrom torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn"
_FIELDS = ("crop_padding", "crop_fill", "flip", "mean", "std", "drop_last")


def program_text(experiment: Experiment, made: Recipe) -> str:
    """The program."""
    config, usual = made.config, type(made.config.data)()
    given = {name: getattr(config.data, name) for name in _FIELDS}
    given = {name: value for name, value in given.items() if value != getattr(usual, name)}
    if config.execution.data_dir:
        given["data_dir"] = config.execution.data_dir
    if config.model.batch_norm != "auto":
        given["batch_norm"] = config.model.batch_norm
    loss = "F.cross_entropy"
    if config.optim.label_smoothing:
        loss = (
            f"lambda outputs, labels: F.cross_entropy(outputs, labels, label_smoothing={config.optim.label_smoothing})"
        )
    if config.optim.loss == "bce":
        made.lost.append("the loss, in train.py: give TrainStep the script's binary cross-entropy of one-hot labels")
    if config.optim.class_weights != "none":
        made.lost.append("class weights, in train.py: give TrainStep a torch.nn.CrossEntropyLoss(weight=...)")
    by_epoch, ema = bool(made.rates), config.optim.ema
    return _TEXT.format(
        where="world.device" + (", memory_format=torch.channels_last" if config.model.channels_last else ""),
        averaging=_AVERAGING if ema else "",
        average=f"    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn({ema!r}))\n" if ema else "",
        compiled=f'    model.compile(mode="{config.model.compile_mode}")\n' if config.model.compile else "",
        averaged="            average.update_parameters(model)\n" if ema else "",
        evaluated="average" if ema else "model",
        name=experiment.script.name,
        torch="import torch\n" if config.model.channels_last else "",
        epochs=config.epochs,
        lr=config.optim.lr,
        dataset=repr(config.data.dataset) if made.set_by_flags else "parts.data()",
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seed=config.seed,
        loading="".join(f", {name}={_written(value)}" for name, value in given.items()),
        weights=WEIGHTS,
        batch_norm=config.model.batch_norm,
        count="EPOCHS" if by_epoch else "EPOCHS * len(train)",
        position="samples // train.order.samples_per_epoch" if by_epoch else "-(-samples // train.order.batch_size)",
        loss=loss,
        precision=config.precision,
        clip_norm=config.optim.clip_norm,
    )
