"""Named configs. A recipe is a function that returns a `Config`; its docstring says what was measured, and where."""

from collections.abc import Callable
from dataclasses import replace

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.config.photo_recipes import folder, imagenet, imagenet_modern, photos
from lockstep.errors import UserError, unknown


def digits() -> Config:
    """The bundled 8x8 digits (1,797 images): a small network in seconds, nothing to download.

    99.44 % top-1 (seed 0) on 1, 2 and 3 processes; 2.3 s of training on 2 CPU threads.
    """
    return Config(
        recipe="digits",
        epochs=20,
        batch_size=64,
        data=DataConfig(dataset="digits"),
        model=ModelConfig(model="digits_net"),
        optim=OptimConfig(
            optimizer="adamw", lr=3e-3, weight_decay=0.01, schedule="cosine", warmup_epochs=1, base_batch_size=64
        ),
    )


def mnist() -> Config:
    """The two-conv network, Adadelta and StepLR of the PyTorch MNIST example.

    `lockstep train mnist --nproc 2 --epochs 6`: 99.13 % top-1 (seed 0), two processes of one CPU thread.
    """
    return Config(
        recipe="mnist",
        epochs=14,
        batch_size=64,
        data=DataConfig(dataset="mnist"),
        model=ModelConfig(model="mnist_net"),
        optim=OptimConfig(optimizer="adadelta", lr=1.0, schedule="step", step_epochs=1, gamma=0.7, base_batch_size=64),
        execution=Execution(eval_batch_size=1000),
    )


def fashion_mnist() -> Config:
    """The mnist recipe on Fashion-MNIST."""
    config = mnist()
    return replace(config, recipe="fashion-mnist", data=DataConfig(dataset="fashion-mnist", flip=True))


def cifar10() -> Config:
    """ResNet-18 with a 32x32 stem, SGD with momentum, cosine; `--model resnet18` has the 224-stem of the tutorials.

    `lockstep train cifar10 --nproc 2 --precision bf16 --epochs 3 --warmup-epochs 0.5`: 80.69 % top-1 (seed 0) on two
    CPU cores. The 30 epochs of the recipe have not been run.
    """
    return Config(
        recipe="cifar10",
        epochs=30,
        batch_size=128,
        data=DataConfig(dataset="cifar10", crop_padding=4, flip=True),
        model=ModelConfig(model="resnet18_cifar", channels_last=True),
        optim=OptimConfig(
            optimizer="sgd",
            lr=0.1,
            momentum=0.9,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup_epochs=1,
            base_batch_size=128,
        ),
    )


def cifar10_speed() -> Config:
    """CIFAR-10 to 94 % in eight epochs, after airbench94_muon (arXiv:2404.00498).

    `lockstep train cifar10-speed`: 94.06 % and 93.88 % (seeds 0, 1), 7.2 minutes each on two CPU cores. Evaluation is
    over six views of an image (--tta shift), as in the published figure. Its parts: models/cifar10_speed.py.
    """
    return Config(
        recipe="cifar10-speed",
        epochs=8,
        batch_size=2000,
        precision="bf16",
        tta="shift",
        data=DataConfig(dataset="cifar10", crop_padding=2, crop_fill="reflect", alternate_flip=True, drop_last=True),
        model=ModelConfig(model="speed_net", channels_last=True),
        optim=OptimConfig(
            optimizer="muon-sgd",
            lr=0.24,
            momentum=0.6,
            weight_decay=0.004,
            schedule="linear",
            label_smoothing=0.2,
            base_batch_size=2000,
        ),
        execution=Execution(eval_batch_size=1000, eval_every=8),
    )


def cifar100() -> Config:
    """ResNet-18 with a 32x32 stem on CIFAR-100: SGD with momentum, rate / 5 after 60, 120 and 160 epochs."""
    config = cifar10()
    optim = replace(config.optim, schedule="multistep", milestones=(60.0, 120.0, 160.0), gamma=0.2)
    return replace(config, recipe="cifar100", epochs=200, data=replace(config.data, dataset="cifar100"), optim=optim)


RECIPES: dict[str, Callable[[], Config]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar10-speed": cifar10_speed,
    "cifar100": cifar100,
    "folder": folder,
    "photos": photos,
    "imagenet": imagenet,
    "imagenet-modern": imagenet_modern,
}


def recipe(name: str) -> Config:
    """The config of a recipe by name, or of a user's own as package.module:function.

    Raises:
        UserError: for a name that nothing answers to, with the nearest ones.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if ":" in name:
        from lockstep.config.objects import load_object, without_exit

        made = without_exit(load_object(name, "recipe"))
        if not isinstance(made, Config):
            raise UserError(f"recipe {name} returned a {type(made).__name__}", "A recipe returns a lockstep.Config.")
        return replace(made, recipe=name)
    raise unknown("recipe", name, RECIPES, "`lockstep recipes` lists them; your own is package.module:function.")
