"""Named configs. A recipe is a function that returns a `Config`; its docstring says what was measured, and where."""

from collections.abc import Callable
from dataclasses import replace

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.errors import UserError, unknown, with_article


def digits() -> Config:
    """The bundled 8x8 digits (1,797 images): a small network in seconds, nothing to download.

    99.44 % top-1 (seed 0) on 1, 2 and 3 processes; 2.3 s of training on 2 CPU threads.
    """
    optim = OptimConfig(optimizer="adamw", lr=3e-3, weight_decay=0.01, warmup_epochs=1, base_batch_size=64)
    return Config(recipe="digits", epochs=20, batch_size=64, optim=optim)


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
    return replace(mnist(), recipe="fashion-mnist", data=DataConfig(dataset="fashion-mnist", flip=True))


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
        optim=OptimConfig(lr=0.1, nesterov=True, weight_decay=5e-4, warmup_epochs=1, base_batch_size=128),
    )


def cifar10_speed() -> Config:
    """CIFAR-10 to 94 % in eight epochs, after airbench94_muon (arXiv:2404.00498).

    `lockstep train cifar10-speed`: 94.06 % and 93.88 % (seeds 0, 1), 7.2 minutes each on two CPU cores. Evaluation is
    over six views of an image (--tta shift), as in the published figure. Its parts: models/cifar10_speed.py.
    """
    data = DataConfig(dataset="cifar10", crop_padding=2, crop_fill="reflect", alternate_flip=True, drop_last=True)
    optim = OptimConfig(optimizer="muon-sgd", lr=0.24, momentum=0.6, weight_decay=0.004, schedule="linear")
    return Config(
        recipe="cifar10-speed",
        epochs=8,
        batch_size=2000,
        precision="bf16",
        tta="shift",
        data=data,
        model=ModelConfig(model="speed_net", channels_last=True),
        optim=replace(optim, label_smoothing=0.2, base_batch_size=2000),
        execution=Execution(eval_batch_size=1000, eval_every=8),
    )


def cifar100() -> Config:
    """ResNet-18 with a 32x32 stem on CIFAR-100: SGD with momentum, rate / 5 after 60, 120 and 160 epochs."""
    config = cifar10()
    optim = replace(config.optim, schedule="multistep", milestones=(60.0, 120.0, 160.0), gamma=0.2)
    return replace(config, recipe="cifar100", epochs=200, data=replace(config.data, dataset="cifar100"), optim=optim)


def folder() -> Config:
    """Your own images: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg, with --data-dir DIR.

    AdamW, since sets are small: from random weights (seed 0) 86.7 % top-1 on 4 x 20 digits and 26.8 % on 10 x 20
    pictures of CIFAR-10, where SGD at a rate of 0.05 ends at 60.3 and 19.2 % (benchmarks/small_sets.py).
    """
    return Config(
        recipe="folder",
        epochs=30,
        batch_size=64,
        data=DataConfig(dataset="folder", resized_crop=True, flip=True, image_size=224),
        model=ModelConfig(model="resnet18", channels_last=True),
        optim=OptimConfig(optimizer="adamw", lr=1e-3, weight_decay=0.05, warmup_epochs=1, base_batch_size=64),
        execution=Execution(eval_batch_size=64),
    )


def photos() -> Config:
    """Fine-tuning on your own photos: torchvision's ResNet-50, its head new, smaller rates for its lower layers.

    Twenty epochs of random crops, TrivialAugment (arXiv:2103.10158), label smoothing and a moving average; pictures are
    shrunk once and kept. What it gives on whose photos has not been measured: its weights can't be fetched here.
    """
    config = folder()
    optim = OptimConfig(optimizer="adamw", lr=3e-4, head_lr=3e-3, layer_decay=0.8, weight_decay=0.05, warmup_epochs=1)
    return replace(
        config,
        recipe="photos",
        epochs=20,
        data=replace(config.data, crop_scale=(0.25, 1.0), augment=("trivialaugmentwide",), decode_size=256),
        model=ModelConfig(model="resnet50", init="pretrained", adapt_init=True, channels_last=True),
        optim=replace(optim, base_batch_size=64, label_smoothing=0.1, ema=0.999, ema_warmup=True),
        execution=Execution(eval_batch_size=64, cache="auto"),
    )


def imagenet() -> Config:
    """ResNet-50 on ImageNet by Goyal et al. (arXiv:1706.02677): 90 epochs, drops after 30, 60 and 80.

    The rate is 0.1 for 256 images and grows with the batch. The paper reports 76.3 % top-1 for a batch of 256; this
    recipe has not been run on the full set here.
    """
    optim = OptimConfig(lr=0.1, nesterov=True, weight_decay=1e-4, scale_lr="linear", base_batch_size=256)
    return replace(
        folder(),
        recipe="imagenet",
        epochs=90,
        batch_size=256,
        model=ModelConfig(model="resnet50", channels_last=True),
        optim=replace(optim, schedule="multistep", milestones=(30.0, 60.0, 80.0), warmup_epochs=5),
        execution=Execution(workers=8, log_every=50),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        *(digits, mnist, fashion_mnist, cifar10, cifar10_speed, cifar100),
        *(folder, photos, imagenet),
    )
}


def recipe(name: str) -> Config:
    """The config of a recipe by name, or of a user's own as package.module:function.
    Raises UserError for a name that nothing answers to, with the nearest ones.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if ":" in name:
        from lockstep.config.objects import load_object, without_exit

        made = without_exit(load_object(name, "recipe"))
        if not isinstance(made, Config):
            raise UserError(f"recipe {name} returned {with_article(made)}", "A recipe returns a lockstep.Config.")
        return replace(made, recipe=name)
    raise unknown("recipe", name, RECIPES, "`lockstep recipes` lists them; your own is package.module:function.")
