"""Families of networks under the law: `python -m tests.training.families [--nproc 2,3,5] [NAME ...]`.

Plain mode, default flags, float64, dropout and drop path above 0: one step's gradients over seven samples on several
numbers of processes, against one. Prints the largest difference of each family, relative to each tensor's largest entry
(one below a thousandth of the model's largest is measured against that), and ends with 1 where one is above 1e-10, or
1e-8 with batch norm. Then the self-check says nothing of 17 steps in float32 on 1, 2 and 3 processes.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config, DataConfig, Execution, ModelConfig
from lockstep.distributed.world import World
from lockstep.parallel.batchnorm import batch_norms
from lockstep.training.assemble import assemble
from tests.pool import Pool

SAMPLES = 7
_BOUND, _BOUND_NORMED, _FLOOR = 1e-10, 1e-8, 1e-3

# name: side of the images in pixels, and what gives it dropout where it has none by default
TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "vgg11_bn": (32, {}),
    "squeezenet1_1": (32, {}),
    "resnet18": (32, {}),
    "resnext50_32x4d": (32, {}),
    "wide_resnet": (32, {}),
    "densenet121": (32, {"drop_rate": 0.1}),
    "googlenet": (32, {"aux_logits": False, "init_weights": False}),
    "inception_v3": (75, {"aux_logits": False, "init_weights": False}),
    "shufflenet_v2_x0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "mnasnet0_5": (32, {}),
    "efficientnet_b0": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "regnet_y_400mf": (32, {}),
    "convnext": (32, {}),
    "vit": (64, {"image_size": 64}),
    "swin": (32, {}),
    "swin_v2": (32, {}),
    "maxvit": (64, {"input_size": (64, 64)}),  # others don't fit its windows
}
_TIMM_DROPS = {"drop_rate": 0.1, "drop_path_rate": 0.1}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, {"img_size": 32, "attn_drop_rate": 0.1, **_TIMM_DROPS}),
    "deit_tiny_patch16_224": (32, {"img_size": 32, "proj_drop_rate": 0.1, **_TIMM_DROPS}),
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 2, **_TIMM_DROPS}),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 4, **_TIMM_DROPS}),
    "xcit_nano_12_p16_224": (32, _TIMM_DROPS),
    "mixer_s32_224": (64, {"img_size": 64, **_TIMM_DROPS}),
    "convnext_atto": (32, _TIMM_DROPS),
    "efficientnet_lite0": (32, _TIMM_DROPS),
    "mobilenetv3_small_050": (32, {"drop_rate": 0.1}),
    "regnetx_002": (32, _TIMM_DROPS),
    "pvt_v2_b0": (32, _TIMM_DROPS),
    "levit_128s": (64, {"img_size": 64, "drop_path_rate": 0.1}),
    "test_vit": (32, {"img_size": 32, **_TIMM_DROPS}),
    "test_resnet": (32, _TIMM_DROPS),
    "test_efficientnet": (32, _TIMM_DROPS),
}
FAMILIES = {**{f"torchvision/{n}": v for n, v in TORCHVISION.items()}, **{f"timm/{n}": v for n, v in TIMM.items()}}


def __getattr__(name: str) -> Callable[..., Any]:
    """The factories that a config names: of a family as `model_torchvision_NAME`, of images as `images_COUNT_SIDE`."""
    kind, _, rest = name.partition("_")
    if kind == "images":
        return partial(_images, *map(int, rest.split("_")))
    if kind == "model":
        return partial(_made, rest.replace("_", "/", 1))
    raise AttributeError(name)


def _made(family: str, num_classes: int) -> nn.Module:
    library, _, name = family.partition("/")
    if library == "timm":
        import timm

        return timm.create_model(name, num_classes=num_classes, **TIMM[name][1])
    from torchvision import models

    options = TORCHVISION[name][1]
    drops = {"dropout": 0.1, "attention_dropout": 0.1}
    model: nn.Module
    match name:  # members of their families that are small enough for five processes in float64
        case "wide_resnet":
            block = models.resnet.Bottleneck
            model = models.ResNet(block, [1, 1, 1, 1], num_classes=num_classes, width_per_group=128)
        case "convnext":
            stages = [models.convnext.CNBlockConfig(24, 48, 2), models.convnext.CNBlockConfig(48, None, 2)]
            model = models.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=num_classes)
        case "swin" | "swin_v2":
            second = name == "swin_v2"
            block = models.swin_transformer.SwinTransformerBlockV2 if second else None
            merging = models.swin_transformer.PatchMergingV2 if second else models.swin_transformer.PatchMerging
            sizes = {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
            how = {"block": block, "downsample_layer": merging, "stochastic_depth_prob": 0.2, "window_size": [4, 4]}
            model = models.SwinTransformer(num_classes=num_classes, **sizes, **drops, **how)
        case "vit":
            sizes = {"patch_size": 32, "num_layers": 3, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
            model = models.VisionTransformer(num_classes=num_classes, **options, **sizes, **drops)
        case "maxvit":
            sizes = {"stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 1], "head_dim": 8}
            how = {"partition_size": 4, "stochastic_depth_prob": 0.2}
            model = models.MaxVit(num_classes=num_classes, **options, **sizes, **how)
        case _:
            model = models.get_model(name, weights=None, num_classes=num_classes, **options)
    if features := {"alexnet": 256 * 36, "vgg11_bn": 512 * 49}.get(name):  # theirs take a gigabyte in float64
        model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, num_classes))
    return model


def _images(count: int, side: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    sets = []
    for _ in range(2):
        images = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        sets.append((images, torch.arange(count) % 3))
    return tuple(sets)


def config_for(family: str, samples: int = SAMPLES, side: int = 0, **changed: Any) -> Config:
    """A run of one family over so many images of `side` pixels (0: the family's)."""
    here = "tests.training.families"
    return Config(
        **{"batch_size": samples, **changed},
        data=DataConfig(dataset=f"{here}:images_{samples}_{side or FAMILIES[family][0]}"),
        model=ModelConfig(model=f"{here}:model_{family.replace('/', '_', 1)}"),
        execution=Execution(device="cpu", threads=1, eval_batch_size=SAMPLES),
    )


def gradients(world: World, config: Config, kept: str) -> tuple[bool, float]:
    """One step's gradients into the file `kept` by one process, else against it: batch norm?, largest difference."""
    run = assemble(config, world, torch.float64)
    batch = next(run.train.epoch(0))
    batch.images = batch.images.double()
    found: dict[str, Tensor] = {}

    def note(*_: object) -> None:
        found.update({n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None})

    run.step.optimizer.register_step_pre_hook(note)
    run.step(batch)
    normed = any(True for _ in batch_norms(run.model))
    largest = 0.0
    if world.rank == 0 and world.size == 1:
        torch.save(found, kept)
    elif world.rank == 0:
        base: dict[str, Tensor] = torch.load(kept, weights_only=True)
        floor = _FLOOR * max(float(t.abs().max()) for t in base.values())
        assert base.keys() == found.keys()
        largest = max(float((found[n] - t).abs().max()) / max(float(t.abs().max()), floor) for n, t in base.items())
    return normed, largest


@dataclass(frozen=True)
class Found:
    """The largest difference of one family, by number of processes, and what it may be."""

    family: str
    bound: float
    differences: dict[int, float]

    @property
    def holds(self) -> bool:
        return all(difference <= self.bound for difference in self.differences.values())

    def __str__(self) -> str:
        each = "  ".join(f"N = {n}: {difference:.1e}" for n, difference in self.differences.items())
        return f"{self.family:<36} {each}{'' if self.holds else f'  ABOVE {self.bound:g}'}"


def compared(pool: Pool, family: str, nproc: tuple[int, ...], kept: str) -> Found:
    """One family on one process, and against it on others."""
    normed, _ = pool.run(gradients, 1, config_for(family), kept)[0]
    differences = {n: pool.run(gradients, n, config_for(family), kept)[0][1] for n in nproc if n > 1}
    return Found(family, _BOUND_NORMED if normed else _BOUND, differences)


def checked(world: World, config: Config) -> None:
    """Steps 0 to 16 with a self-check that raises what it finds."""
    run = assemble(replace(config, execution=replace(config.execution, law="strict")), world)
    for epoch in range(-(-17 // len(run.train))):
        for batch in run.train.epoch(epoch):
            run.step(batch)


def said(pool: Pool, family: str, nproc: tuple[int, ...] = (1, 2, 3)) -> str:
    """What the self-check says of a family."""
    try:
        for n in nproc:
            pool.run(checked, n, config_for(family, 48, batch_size=12))
    except AssertionError as error:
        return next(line for line in reversed(str(error).splitlines()) if "--law strict:" in line)
    return ""


def main() -> int:
    import tempfile
    from pathlib import Path

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc", default="2,3,5")
    parser.add_argument("families", nargs="*")
    given = parser.parse_args()
    nproc, bad = tuple(map(int, given.nproc.split(","))), []
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families or FAMILIES:
            try:
                with Pool(timeout=600, single=True) as pool:
                    found = compared(pool, family, nproc, str(Path(folder, "gradients.pt")))
                with Pool(timeout=600, single=True) as pool:
                    alarm = said(pool, family)
                print(found, alarm, flush=True)
                if not found.holds or alarm:
                    bad.append(family)
            except AssertionError as error:  # of a rank: the next family gets other ones
                print(f"{family:<36} failed: {str(error).strip().splitlines()[-1]}", flush=True)
                bad.append(family)
    print(f"{len(bad)} beyond their bounds or failed: {', '.join(bad) or 'none'}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
