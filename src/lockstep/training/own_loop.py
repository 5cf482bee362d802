"""The loaders of a config for who writes the loop."""

from typing import Any

from lockstep.config import Config, DataConfig, Execution, ModelConfig, SamplesConfig
from lockstep.data.loaders import EvalLoader, TrainLoader
from lockstep.processes.world import World
from lockstep.training.assemble import eval_loader, load_data, train_loader


def loaders(
    dataset: str | tuple[Any, Any],
    world: World,
    *,
    batch_size: int,
    seed: int = 0,
    accumulate: int = 1,
    exact: int = 0,
    batch_norm: str = "auto",
    data_dir: str = "",
    workers: int = 2,
    cache: str = "",
    epochs: int = 1 << 30,
    **data: Any,
) -> tuple[TrainLoader, EvalLoader]:
    """The training and the evaluation loader of a data set, for a loop of one's own.

    Args:
        dataset: a name that `--dataset` takes, package.module:factory, or (train, val): map-style Datasets as they
            are, with transforms of their own, or pairs of tensors (images, labels). The same on every rank.
        world: as passed to the function that `launch` runs.
        batch_size: global: samples per step over all ranks.
        exact: for exact mode: cut each batch into so many slices.
        batch_norm: as passed to `parallelize`: the batch is cut between its groups alone.
        epochs: how many there will be, which `mix_off_epochs` alone asks for.
        cache: keep pictures that `decode_size` shrank: in a folder, "ram" or "auto".
        data: further fields of DataConfig and SamplesConfig, as crop_padding=4, flip=True, fraction=0.25, mixup=0.2.
    """
    name, given = (dataset, None) if isinstance(dataset, str) else ("ls.loaders", dataset)
    samples = {name: data.pop(name) for name in [*data] if name in SamplesConfig.__dataclass_fields__}
    config = Config(
        batch_size=batch_size,
        seed=seed,
        accumulate=accumulate,
        exact=exact,
        epochs=epochs,
        model=ModelConfig(batch_norm=batch_norm),
        data=DataConfig(dataset=name, **data),
        samples=SamplesConfig(**samples),
        execution=Execution(data_dir=data_dir, workers=workers, cache=cache),
    )
    train_set, val_set = load_data(config, world, given)
    return train_loader(config, train_set, world), eval_loader(config, val_set, world)
