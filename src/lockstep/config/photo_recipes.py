"""Recipes for pictures in class folders, of any size: one's own photos, and ImageNet."""

from dataclasses import replace

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, SamplesConfig


def folder() -> Config:
    """Your own images: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg, given with --data-dir DIR."""
    return Config(
        recipe="folder",
        epochs=30,
        batch_size=64,
        data=DataConfig(dataset="folder", resized_crop=True, flip=True, image_size=224),
        model=ModelConfig(model="resnet18", channels_last=True),
        optim=OptimConfig(
            optimizer="sgd",
            lr=0.05,
            momentum=0.9,
            weight_decay=1e-4,
            schedule="cosine",
            warmup_epochs=1,
            base_batch_size=64,
        ),
        execution=Execution(eval_batch_size=64),
    )


def imagenet() -> Config:
    """ResNet-50 on ImageNet by Goyal et al. (arXiv:1706.02677): 90 epochs, drops after 30, 60 and 80.

    The rate is 0.1 for 256 images and grows with the batch. The paper reports 76.3 % top-1 for a batch of 256; this
    recipe has not been run on the full set here.
    """
    return Config(
        recipe="imagenet",
        epochs=90,
        batch_size=256,
        data=DataConfig(dataset="folder", resized_crop=True, flip=True, image_size=224),
        model=ModelConfig(model="resnet50", channels_last=True),
        optim=OptimConfig(
            optimizer="sgd",
            lr=0.1,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            schedule="multistep",
            milestones=(30.0, 60.0, 80.0),
            warmup_epochs=5,
            scale_lr="linear",
            base_batch_size=256,
        ),
        execution=Execution(workers=8, log_every=50),
    )


def photos() -> Config:
    """Fine-tuning on your own photos: torchvision's ResNet-50, its head new, smaller rates for its lower layers.

    Twenty epochs of random crops, TrivialAugment (arXiv:2103.10158), label smoothing and a moving average; pictures are
    shrunk once and kept. What it gives on whose photos has not been measured: its weights can't be fetched here.
    """
    return Config(
        recipe="photos",
        epochs=20,
        batch_size=64,
        data=DataConfig(
            dataset="folder",
            resized_crop=True,
            crop_scale=(0.25, 1.0),
            flip=True,
            augment=("trivialaugmentwide",),
            image_size=224,
            decode_size=256,
        ),
        model=ModelConfig(model="resnet50", init="pretrained", adapt_init=True, channels_last=True),
        optim=OptimConfig(
            optimizer="adamw",
            lr=3e-4,
            head_lr=3e-3,
            layer_decay=0.8,
            weight_decay=0.05,
            schedule="cosine",
            warmup_epochs=1,
            base_batch_size=64,
            label_smoothing=0.1,
            ema=0.999,
            ema_warmup=True,
        ),
        execution=Execution(eval_batch_size=64, cache="auto"),
    )


def imagenet_modern() -> Config:
    """ResNet-50 on ImageNet for 600 epochs by the parts of torchvision's second weights (pytorch/vision#3995).

    TrivialAugment, random erasing, mixup, CutMix, repeated augmentation, label smoothing, no decay of norms, a moving
    average, and training on 176 pixels for an evaluation on 224. torchvision reports 80.86 % top-1; this recipe has not
    been run on the full set here. Its average is taken at each step, not at each 32nd, with the same weight in all.
    """
    config = imagenet()
    return replace(
        config,
        recipe="imagenet-modern",
        epochs=600,
        batch_size=1024,
        data=replace(
            config.data,
            augment=("trivialaugmentwide", "randomerasing:0.1,value=mean"),
            train_size=176,
            crop_pct=224 / 232,
        ),
        samples=SamplesConfig(mixup=0.2, cutmix=1.0, aug_repeats=4),
        optim=OptimConfig(
            optimizer="sgd",
            lr=0.5,
            momentum=0.9,
            weight_decay=2e-5,
            decay_norms="no",
            schedule="cosine",
            warmup_epochs=5,
            scale_lr="linear",
            base_batch_size=1024,
            label_smoothing=0.1,
            ema=0.99997,
        ),
    )
