"""Which settings go together. Each function refuses what one mode can't keep its promise with, and says why."""

from lockstep.config.fields import require
from lockstep.config.settings import Settings


def require_sound(config: Settings) -> None:
    """Raise UserError for settings of a config that exclude each other."""
    if config.exact:
        _exact(config)
    if config.link.compress != "none":
        _compressed(config)
    if config.link.sync_every > 1:
        _local(config)
    _pictures(config)
    _samples(config)
    model, execution, optim = config.model, config.execution, config.optim
    require(
        optim.scale_lr == "none" or optim.base_batch_size > 0,
        f"--scale-lr {optim.scale_lr} needs the batch size that --lr {optim.lr:g} was made for",
        "Give it with --base-batch-size.",
    )
    if execution.strategy == "fsdp":
        _parts(config)
    if model.activation_checkpointing:
        why = "the compiler decides by itself what it computes again"
        _exclude("--activation-checkpointing", {"--compile": (model.compile, why)})
    if late := [epochs for epochs, _ in model.unfreezing if epochs >= config.epochs]:
        require(
            False,
            f"--unfreeze-at {','.join(model.unfreeze_at)}: {late[0]} epochs are never over in a run of {config.epochs}",
            "Give fewer, or more --epochs.",
        )
    if execution.model_parallel > 1:
        why = "a graph that is cut at each stage gains nothing"
        _exclude(f"--model-parallel {execution.model_parallel}", {"--compile": (model.compile, why)})
    if model.group:
        groups = -(-config.batch_size // model.group)
        require(
            config.accumulate <= groups,
            f"--accumulate {config.accumulate} with --batch-norm {model.batch_norm}: a batch of {config.batch_size} is "
            f"{groups} group(s), which are not cut",
            f"Use --accumulate 1 to {groups}, or smaller groups.",
        )
    if config.accumulate == 0:
        _found_by_trying(config)
    if execution.strategy == "dp":
        norm = f"--batch-norm {model.batch_norm}"
        alone = "nn.DataParallel's copies don't talk to each other; ddp's ranks do"
        first = "every copy would compute with the first GPU's weights"
        _exclude(
            "--strategy dp",
            {norm: (model.batch_norm not in ("auto", "local"), alone), "--compile": (model.compile, first)},
        )


def _pictures(config: Settings) -> None:
    """What a set has to be for what is done with its pictures."""
    require(
        not config.data.val_fraction or config.data.is_divisible,
        f"--val-fraction with --dataset {config.data.dataset}: that set has a validation part, or is code of your own",
        "Leave the flag out; it divides folders and tables of pictures.",
    )
    require(
        not config.execution.cache or config.data.decode_size,
        f"--cache {config.execution.cache} keeps pictures as they are shrunk, and nothing shrinks them",
        "Give --decode-size too, as 256.",
    )


def _samples(config: Settings) -> None:
    """What the samples of a batch have to be for what is done with them."""
    samples = config.samples
    require(
        config.batch_size % samples.aug_repeats == 0,
        f"--aug-repeats {samples.aug_repeats} of each image don't fill a batch of {config.batch_size}",
        f"Use a multiple of {samples.aug_repeats} as --batch-size.",
    )
    weights = config.optim.class_weights
    computed, why = weights.startswith(("auto", "effective")), "rare classes would count twice"
    _exclude(
        f"--balance {samples.balance}",
        {f"--class-weights {weights}": (samples.balance != "none" and computed, why)},
    )
    mix = " and ".join(f"--{name} {alpha:g}" for name in ("mixup", "cutmix") if (alpha := getattr(samples, name)))
    require(
        not mix or config.batch_size > 1,
        f"{mix} with --batch-size 1: an image has no other to be mixed with",
        "Use a larger --batch-size.",
    )
    require(
        not mix or samples.mix_off_epochs < config.epochs,
        f"{mix} with --mix-off-epochs {samples.mix_off_epochs} of {config.epochs} epochs mixes nothing",
        "Leave some epochs for it.",
    )


def _parts(config: Settings) -> None:
    """What can't be computed of parts of a parameter."""
    why = "Muon orthogonalises whole matrices, and each process holds a part"
    _exclude("--strategy fsdp", {"--optimizer muon": (config.optim.optimizer == "muon", why)})
    named = f"--optimizer {config.optim.optimizer}"
    why = "timm's optimizers take norms of whole parameters, and each process holds a part"
    _exclude("--strategy fsdp", {named: (config.optim.optimizer.startswith("timm:"), why)})


def _found_by_trying(config: Settings) -> None:
    """What `--accumulate auto` can't try."""
    alone = "it tries steps of a whole model on each process's device"
    stages = config.execution.model_parallel
    _exclude(
        "--accumulate auto",
        {
            f"--exact {config.exact}": (config.exact > 0, "exact mode passes its slices, whatever --accumulate is"),
            f"--strategy {config.execution.strategy}": (config.execution.strategy in ("dp", "fsdp"), alone),
            f"--model-parallel {stages}": (stages > 1, alone),
            "--compile": (config.model.compile, "each try would be compiled anew, for minutes"),
        },
    )


def _exclude(mode: str, reasons: dict[str, tuple[bool, str]]) -> None:
    """Refuse the first of the settings that is on: flag -> (it is on, why it does not go with the mode)."""
    for flag, (on, why) in reasons.items():
        require(not on, f"{mode} with {flag}: {why}", "Leave one of the two out.")


def _exact(config: Settings) -> None:
    """What exact mode can't make the same on any number of processes."""
    mode, execution, link = f"--exact {config.exact}", config.execution, config.link
    require(
        1 <= config.exact <= config.batch_size,
        f"{mode} of a batch of {config.batch_size}: a slice needs a sample",
        f"Use 1 to {config.batch_size} (0: off).",
    )
    adds = {
        "single": "exact mode has its own reduction; --nproc 1 is one process",
        "dp": "DataParallel adds floats in an order of its own",
    }
    _exclude(
        mode,
        {
            f"--strategy {execution.strategy}": (execution.strategy in adds, adds.get(execution.strategy, "")),
            f"--model-parallel {execution.model_parallel}": (
                execution.model_parallel > 1,
                "its integer sums are made on one device",
            ),
            f"--compress {link.compress}": (link.compress != "none", "it sends every bit of a gradient"),
            f"--sync-every {link.sync_every}": (
                link.sync_every > 1,
                "weights between two averagings depend on the number of processes",
            ),
            f"--batch-norm {config.model.batch_norm}": (
                config.model.batch_norm not in ("auto", "local"),
                "each slice has its own batch statistics, the same on any number of processes",
            ),
            "--compile": (
                config.model.compile,
                "a compiled kernel depends on the batch shapes that its process has met",
            ),
            "--strategy fsdp and --channels-last": (
                execution.strategy == "fsdp" and config.model.channels_last,
                "FSDP takes contiguous weights alone, whose convolutions round otherwise",
            ),
            "--precision tf32": (config.precision == "tf32", "exact mode switches TF32 off; use fp32, bf16 or fp16"),
        },
    )


def _compressed(config: Settings) -> None:
    """What a communication hook of DDP can't do."""
    remembers = "what PowerSGD could not send it adds to the next gradient, and a non-finite one would stay for ever"
    powersgd, strategy = config.link.powersgd_rank > 0, config.execution.strategy
    _exclude(
        f"--compress {config.link.compress}",
        {
            f"--strategy {strategy}": (strategy != "ddp", "it is a hook of DDP's all-reduce"),
            "--precision fp16": (powersgd and config.precision == "fp16", f"{remembers}; use bf16"),
            f"--on-nonfinite {config.on_nonfinite}": (powersgd and config.on_nonfinite != "stop", remembers),
            "--unfreeze-at": (
                powersgd and bool(config.model.unfreeze_at),
                "what PowerSGD could not send of a frozen layer's gradients would move it once it is trained",
            ),
        },
    )


def _local(config: Settings) -> None:
    """What processes can't do alike that take steps alone."""
    alone = "each process would decide alone, on its own gradients"
    strategy = config.execution.strategy
    _exclude(
        f"--sync-every {config.link.sync_every}",
        {
            f"--strategy {strategy}": (strategy not in ("ddp", "single"), "it averages whole models over processes"),
            "--batch-norm global": (config.model.batch_norm == "global", "that talks in every layer of every step"),
            f"--model-parallel {config.execution.model_parallel}": (
                config.execution.model_parallel > 1,
                "it averages whole models, each on one device",
            ),
            "--precision fp16": (config.precision == "fp16", f"which steps to skip {alone}; use bf16"),
            "--on-nonfinite skip": (config.on_nonfinite == "skip", alone),
            "--unfreeze-at": (
                bool(config.model.unfreeze_at),
                "the mean over processes would round the weights that are frozen until then",
            ),
            f"--ema {config.optim.ema:g}": (config.optim.ema > 0, "between two averagings there are no common weights"),
            "--find-unused-parameters": (
                config.model.find_unused_parameters,
                "a parameter that one process alone uses has no common optimizer state",
            ),
        },
    )
    every = config.recovery.checkpoint_every
    steps = config.recovery.checkpoint_interval
    require(
        steps.unit != "steps" or steps.count % config.link.sync_every == 0,
        f"--checkpoint-every {every} with --sync-every {config.link.sync_every}: a checkpoint needs common weights",
        f"Use a multiple of {config.link.sync_every} steps, or epochs.",
    )
