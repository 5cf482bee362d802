"""Random command lines for tests/fuzz_law.py: small runs on the bundled digits, of a few steps."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz_sets import PICTURES

Give = Callable[..., None]
VARIANTS = "tests.commands.variants"
_TINY = (  # name, least image size, how often
    ("mlp", 4, 16),
    ("digits_net", 4, 16),
    ("mnist_net", 6, 16),
    ("mlp", 4, 8),
    (f"{VARIANTS}:normed_net", 4, 16),
    (f"{VARIANTS}:dropping_net", 4, 16),
    (f"{VARIANTS}:centred_net", 4, 4),
    ("squeezenet1_1", 20, 1),
    ("shufflenet_v2_x0_5", 32, 1),
    ("mobilenet_v3_small", 32, 1),
    ("timm/test_resnet", 32, 1),
    ("timm/test_vit", 32, 1),
    ("timm/test_efficientnet", 32, 1),
    ("timm/test_convnext", 32, 1),
)
_TRANSFORMS = (
    *("randaugment:2,9", "trivialaugmentwide", "autoaugment:svhn", "augmix", "randomerasing:value=mean"),
    *("colorjitter:0.4,0.4", "randomresizedcrop", "gaussianblur:3,p=0.5", "randomrotation:15,expand=True"),
    "tests.data.test_transforms:own",
)


@dataclass(frozen=True)
class Drawn:
    """A configuration. `flags` are those of train and verify alike."""

    recipe: str
    flags: tuple[str, ...]
    nproc: tuple[int, ...]
    exact: int
    stop: int  # the step after which a run is stopped, to go on with another number of processes; 0: it isn't
    threads: int  # of an exact run on the first number of processes that must leave the same; 0: none is tried
    local: bool  # batch statistics of a process's share were asked for

    def line(self, command: str) -> str:
        """The command line that shows it."""
        return f"lockstep {command} {self.recipe} {' '.join(self.flags)} --nproc {','.join(map(str, self.nproc))}"


def draw(rng: random.Random, pictures: Path) -> Drawn:
    """One configuration. `pictures`: a folder that `fuzz_sets.write_pictures` has filled."""
    source = rng.choices(["digits", "several", "pictures"], [8, 1, 1])[0]
    dataset = {"digits": "digits", "several": "tests.fuzz_sets:several", "pictures": "folder"}[source]
    flags: list[str] = ["--dataset", dataset, "--device", "cpu"]

    def give(flag: str, *values: object) -> None:
        flags.extend([f"--{flag}", *map(str, values)])

    def sometimes(often: float) -> bool:
        return rng.random() < often

    recipe = rng.choice(["digits", "digits", "mnist", "cifar10"])
    model, least, _ = rng.choices(_TINY, [often for *_, often in _TINY])[0]
    give("model", model)
    small = least < 20
    others = [least, least + 16] if "vit" in model else [least, least + 1, 40]  # whole patches
    size = rng.choice([0, 8, *range(least, 14)] if small else others)
    if source == "pictures":
        size = size or 8
        give("data-dir", pictures)
        give("decode-size", size + rng.randint(0, 9))
        give("cache", pictures.parent / "cache")
        give("workers", 0)  # starting them takes seconds
    if size:
        give("image-size", size)
    batch = rng.randint(5, 40) if small else rng.randint(5, 14)
    give("batch-size", batch)
    samples = batch * rng.randint(1, 3 if small else 2) + rng.randint(0, batch - 1)
    if sometimes(0.15) and batch % 2 == 0:
        give("aug-repeats", 2)
    give("fraction", round(min(1.0, samples / (PICTURES if source == "pictures" else 1437)), 5))
    give("epochs", rng.choice([1, 2]))
    give("seed", rng.randint(0, 999))
    if sometimes(0.15):
        give("freeze", "*.bias")
    # what centred_net does with its share is by design another thing for each share, and is for exact mode alone
    exact = rng.randint(2, min(9, batch)) if sometimes(0.6) or "centred" in model else 0
    nproc = rng.choice([(1, 2), (1, 3), (2, 3), (1, 2, 3), (3, 1), (1, 5)] if small else [(1, 2), (1, 3), (2, 1)])
    nproc = tuple(n for n in nproc if n <= (exact or batch)) or (1, 2)
    nproc = nproc if len(nproc) > 1 else (1, 2)
    if exact:
        give("exact", exact)
    if sometimes(0.3):
        give("accumulate", rng.randint(1, min(4, batch // max(nproc))))
    give("precision", rng.choices(["fp32", "bf16", "fp16"], [6, 3, 2])[0])
    local = _batch_norm(rng, give, exact, batch)
    _optimizer(rng, give, source)
    _augmentation(rng, give, size or 8)
    if sometimes(0.15):
        give("on-nonfinite", rng.choice(["skip", "rollback"]))
    if sometimes(0.15):
        flags.append(
            rng.choice(["--channels-last", "--no-channels-last"] if recipe == "cifar10" else ["--channels-last"])
        )
    if sometimes(0.1):
        give("tta", rng.choice(["mirror", "shift"]))
    if sometimes(0.1):
        give("loader", "streaming")
        if source != "pictures":
            give("workers", 0)
    give("eval-batch-size", rng.choice([100, 250, 360, 37] if small else [90, 120]))
    threads = 2 if sometimes(0.1) and max(nproc) <= 2 else 1
    give("threads", threads)
    stop = rng.randint(1, 2) if sometimes(0.4) else 0
    again = 3 - threads if exact and sometimes(0.4) else 0
    return Drawn(recipe, tuple(flags), nproc, exact, stop, again, local)


def _batch_norm(rng: random.Random, give: Give, exact: int, batch: int) -> bool:
    """Flags of batch norm; returns whether local statistics were asked for."""
    kinds = ["", "local"] * 9 + ["global", "groups"] if exact else ["", "", "global", "local", "groups"]
    kind = rng.choice(kinds)
    if kind:
        give("batch-norm", f"groups:{rng.randint(2, max(2, batch // 2))}" if kind == "groups" else kind)
    return kind == "local"


def _optimizer(rng: random.Random, give: Give, source: str) -> None:
    name, lr = rng.choice([("sgd", 0.05), ("adam", 1e-3), ("adamw", 3e-3), ("adadelta", 1.0), ("timm:muon", 0.02)])
    give("optimizer", name)
    give("lr", lr)
    if name == "sgd":
        momentum = rng.choice([0.0, 0.9])
        give("momentum", momentum)
        give("nesterov" if momentum and rng.random() < 0.5 else "no-nesterov")
    else:
        give("no-nesterov")
    if rng.random() < 0.4:
        give("weight-decay", 0.01)
    for often, flag, value in (
        (0.25, "clip-norm", 0.5),
        (0.25, "ema", rng.choice([0.9, 0.99])),
        (0.25, "label-smoothing", 0.1),
        (0.2, "warmup-epochs", 1),
        (1.0 if source == "several" else 0.15, "loss", "bce" if source == "several" else rng.choice(["bce", "focal"])),
        (0.1, "class-weights", "1,2,1,3" if source == "pictures" else "1,2,1,3,1,1,4,1,1,0.5"),
    ):
        if rng.random() < often:
            give(flag, value)
    if rng.random() < 0.3:
        give("schedule", rng.choice(["constant", "linear", "step", "cosine", "one-cycle"]))


def _augmentation(rng: random.Random, give: Give, size: int) -> None:
    give("crop-padding", rng.choice([0, 0, 1, 2]))
    if rng.random() < 0.3:
        give("crop-fill", "reflect")
    give(rng.choice(["flip", "no-flip", "no-flip"]))
    if rng.random() < 0.2:
        give("alternate-flip")
    if rng.random() < 0.3:
        give("cutout", rng.randint(1, size // 2))
    if rng.random() < 0.15:
        give("balance", rng.choice(["equal", "sqrt"]))
    for flag in ("mixup", "cutmix"):
        if rng.random() < 0.2:
            give(flag, rng.choice([0.2, 1.0]))
    if rng.random() < 0.25:
        give("augment", *rng.sample(_TRANSFORMS, rng.randint(1, 2)))
    if rng.random() < 0.2:
        give("drop-last")
