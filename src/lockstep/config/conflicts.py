"""Which settings don't go together, and why."""

import functools
import re
from typing import Any

from lockstep.config.fields import Flag, check_fields, flags_of, values_of
from lockstep.errors import UserError

# Why, and the settings: a field, and a regular expression of its value; without one: any but its default.
# Alternatives stand behind the last one.
CONFLICTS = (
    ("it sends every bit of a gradient", "exact", "compress"),
    ("each slice has its own statistics, the same on any number of processes", "exact", "batch_norm global|groups.*"),
    ("a compiled kernel depends on the batch shapes that its process has met", "exact", "compile"),
    ("FSDP's reduce-scatter adds floats; ddp's buckets are replaced by integer sums", "exact", "strategy fsdp"),
    ("exact mode switches TF32 off", "exact", "precision tf32"),
    ("it is a hook of DDP's all-reduce", "compress", "strategy fsdp"),
    ("timm's take norms of whole parameters, and each process holds a part", "strategy fsdp", "optimizer timm:.*"),
    ("the compiler decides by itself what it computes again", "activation_checkpointing", "compile"),
    ("Nesterov's is a momentum of SGD", "nesterov", r"optimizer (?!sgd$).* / momentum 0(\.0)?"),
    ("it makes its own groups", "optimizer muon-sgd|(?!timm:).+:.*", "layer_decay / head_lr / decay_norms no"),
    ("it never drops; give epochs, as --milestones 100,150", "schedule multistep", "milestones (?!.)"),
    ("for which batch size --lr was chosen is not known", "scale_lr", "base_batch_size 0"),
    ("there is no average to begin with", "ema_warmup", r"ema 0(\.0)?"),
    ("it ends nothing; give --patience 5", "min_delta", "patience 0"),
    ("rare classes would count twice", "balance", "class_weights (auto|effective).*"),
    ("an image has no other to be mixed with", "batch_size 1", "mixup / cutmix"),
    ("it changes nothing", "resized_crop False", "crop_scale / crop_ratio"),
    ("evaluation needs a size too, as --image-size 224", "train_size", "image_size 0"),
    ("that set has a validation part, or is code", "val_fraction", "dataset (?!folder$|table:|hf:|tv:|shards:).*"),
    ("only shards are read in windows", "shuffle_window", "dataset (?!shards:).*"),
    ("it draws by class, from all shards", "shuffle_window", "balance"),
    ("nothing shrinks the pictures that it keeps; give --decode-size 256", "cache", "decode_size 0"),
    ("nothing would be kept to go on from", "max_time", "checkpoint_every 0|never"),
)


class Conflict(UserError):
    """Settings that don't go together; `flags` are theirs."""

    def __init__(self, message: str, remedy: str, flags: tuple[Flag, ...]) -> None:
        super().__init__(message, remedy)
        self.flags = flags


def check(group: Any) -> None:
    """Check each field of a config, and which of them don't go together. Raises UserError."""
    check_fields(group)
    values = values_of(group)
    cls: type = type(group)
    for why, settings in _rules(cls):
        if all(_is_on(flag, form, values[flag.field]) for flag, form in settings):
            first, *others = (flag.shown(values[flag.field]) for flag, _ in settings)
            theirs = tuple(flag for flag, _ in settings)
            raise Conflict(f"{first} with {' and '.join(others)}: {why}", "Leave one of them out.", theirs)


def _is_on(flag: Flag, form: str, value: Any) -> bool:
    return re.fullmatch(form, flag.text(value)) is not None if form else value != flag.default


@functools.cache
def _rules(cls: type) -> list[tuple[str, list[tuple[Flag, str]]]]:
    """The rules on fields of a class, or of those inside it."""
    flags, found = flags_of(cls), []
    for why, *settings, last in CONFLICTS:
        for alternative in last.split(" / "):
            parted = [setting.partition(" ") for setting in (*settings, alternative)]
            if all(name in flags for name, _, _ in parted):
                found.append((why, [(flags[name], form) for name, _, form in parted]))
    return found
