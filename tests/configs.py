"""Any valid config, for property tests."""

from dataclasses import replace
from typing import Any, get_args

from hypothesis import assume
from hypothesis import strategies as st

from lockstep.commands import COMMANDS
from lockstep.commands.shared.arguments import HelpAsked, Source
from lockstep.config import (
    LOG_MIRRORS,
    OPTIMIZERS,
    CommConfig,
    Config,
    DataConfig,
    Execution,
    ModelConfig,
    OptimConfig,
    Precision,
    SamplesConfig,
    ScheduleName,
    SelectionConfig,
)
from lockstep.config.fields import Flag, flag_names
from lockstep.config.optim import Metric
from lockstep.errors import UserError


def floats(low: float, high: float = 1e6, **open_ends: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, **open_ends)


def tuples(values: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(values, max_size=4, unique=True).map(tuple)


names = st.text("abcXYZ019_-./:é ", max_size=12).filter(lambda text: not text.startswith("-"))
counts = st.integers(1, 10**6)
flags = st.booleans()

data = st.builds(
    DataConfig,
    dataset=names.filter(bool),
    fraction=floats(0, 1, exclude_min=True),
    crop_padding=st.integers(0, 9),
    crop_fill=st.sampled_from(["zero", "reflect"]),
    flip=flags,
    alternate_flip=flags,
    cutout=st.integers(0, 9),
    augment=tuples(st.sampled_from(["randaugment:2,9", "colorjitter:0.4,hue=(-0.1,0.1)", "my.module:function"])),
    resized_crop=st.just(True),
    crop_scale=st.sampled_from([(0.08, 1.0), (0.35, 1.0)]),
    crop_ratio=st.sampled_from([(0.75, 1.5), (1.0, 1.0)]),
    image_size=st.integers(0, 512),
    drop_last=flags,
    decode_size=st.just(0) | st.integers(512, 4096),
    skip_broken=flags,
)
samples = st.builds(
    SamplesConfig, balance=st.sampled_from(["none", "equal", "sqrt"]), mixup=floats(0), cutmix=floats(0)
)
models = st.builds(
    ModelConfig,
    model=names.filter(bool),
    batch_norm=st.sampled_from(["auto", "global", "local", "groups:8"]),
    channels_last=flags,
    compile=flags,
    freeze=tuples(st.sampled_from(["conv1", "layer[12]", "*.bias"])),
    freeze_until=names,
)
optims = st.builds(
    OptimConfig,
    optimizer=st.sampled_from([*OPTIMIZERS, "package.module:factory"]),
    lr=floats(0, exclude_min=True),
    momentum=floats(0, 1, exclude_max=True),
    weight_decay=floats(0),
    schedule=st.sampled_from([name for name in get_args(ScheduleName) if name != "multistep"]),
    warmup_epochs=floats(0),
    step_epochs=floats(0, exclude_min=True),
    milestones=tuples(floats(0)),
    gamma=floats(0, exclude_min=True),
    scale_lr=st.sampled_from(["linear", "sqrt", "none"]),
    base_batch_size=st.integers(1, 10**6),
    clip_norm=floats(0),
    label_smoothing=floats(0, 1, exclude_max=True),
    loss=st.sampled_from(["cross-entropy", "bce", "focal", "focal:0.5"]),
    class_weights=st.sampled_from(["none", "none", "auto", "effective:0.99", "1,2.5"]),
    ema=floats(0, 1, exclude_min=True, exclude_max=True),
    ema_warmup=flags,
    decay_norms=st.sampled_from(["auto", "yes"]),
)
chosen_by = st.builds(
    SelectionConfig, keep_best=st.sampled_from(get_args(Metric)), patience=st.integers(1, 99), min_delta=floats(0)
)
executions = st.builds(
    Execution,
    out=names,
    data_dir=names,
    nproc=st.just("auto") | st.integers(1, 8),
    gpus=tuples(st.integers(0, 7)),
    threads=st.integers(0, 64),
    master_addr=names,
    master_port=st.integers(0, 65535),
    collective_timeout=floats(0, exclude_min=True),
    workers=st.integers(0, 16),
    eval_every=counts,
    loader=st.sampled_from(["auto", "resident", "streaming"]),
    eval_batch_size=counts,
    log=tuples(st.sampled_from(LOG_MIRRORS)),
    log_every=counts,
)


@st.composite
def _configs(draw: st.DrawFn) -> Config:
    parts: dict[str, Any] = {
        "data": draw(data),
        "samples": draw(samples),
        "model": draw(models),
        "optim": draw(optims),
        "selection": draw(chosen_by),
        "execution": draw(executions),
    }
    batch_size = draw(st.integers(8, 10**6))
    numbers = {"epochs": draw(counts), "batch_size": batch_size, "seed": draw(st.integers(0, 2**63 - 1))}
    match draw(st.sampled_from(["plain", "fsdp", "compressed"])):
        case "fsdp":
            parts |= {"execution": replace(parts["execution"], strategy="fsdp")}
        case "compressed":
            parts |= {"comm": CommConfig(draw(st.sampled_from(["fp16", "bf16"])))}
    try:
        chosen: dict[str, Any] = {
            "precision": draw(st.sampled_from(get_args(Precision))),
            "tta": draw(st.sampled_from(["none", "shift"])),
        }
        return Config(**{**chosen, **numbers, **parts})
    except UserError:  # two fields that exclude each other
        assume(False)
        raise


configs = _configs()


def flags_of_command(words: str) -> dict[str, Flag]:
    """The flags of a command, by each of their names: those of the dataclass that its help is about."""
    name, *rest = words.split()
    try:
        COMMANDS[name].run([*rest, "--help"])
    except HelpAsked as asked:
        with_source = "RECIPE" in COMMANDS[name].arguments and name != "show"
        return {**flag_names(asked.default), **(flag_names(Source) if with_source else {})}
    return {}
