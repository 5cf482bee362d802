"""The command line: words to values, and a config as words again."""

import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.fields import Flag
from lockstep.errors import UserError, unknown

# switches that are short for a flag and its value
SHORT = {
    "--sync-bn": ("--batch-norm", "global"),
    "--no-sync-bn": ("--batch-norm", "local"),
    "--bf16": ("--precision", "bf16"),
    "--fp16": ("--precision", "fp16"),
    "--pretrained": ("--init", "pretrained"),
}
# what other trainers call a flag -> its name here
HABITS = {
    "-b": "--batch-size", "-v": "--verbose", "--bs": "--batch-size", "-j": "--workers", "--num-workers": "--workers",
    "--wd": "--weight-decay", "--opt": "--optimizer", "--sched": "--schedule", "--lr-scheduler": "--schedule",
    "--learning-rate": "--lr", "--nproc-per-node": "--nproc", "--ip": "--master-addr", "--port": "--master-port",
    "--lr-step-size": "--step-epochs", "--lr-gamma": "--gamma", "--lr-warmup-epochs": "--warmup-epochs",
    "--lr-base-size": "--base-batch-size", "--num-epochs": "--epochs", "--max-epochs": "--epochs",
    "-a": "--model", "--arch": "--model", "--initial-checkpoint": "--init", "--torchcompile": "--compile",
    "-o": "--out", "--output": "--out", "--output-dir": "--out", "--data-path": "--data-dir", "--root": "--data-dir",
    "--smoothing": "--label-smoothing", "--model-ema-decay": "--ema", "--clip-grad": "--clip-norm",
    "--clip-grad-norm": "--clip-norm", "--gradient-clip-val": "--clip-norm", "--grad-accum-steps": "--accumulate",
    "--gradient-accumulation-steps": "--accumulate", "--accumulate-grad-batches": "--accumulate",
    "--img-size": "--image-size", "--val-crop-size": "--image-size", "--train-crop-size": "--train-size",
    "--ra-reps": "--aug-repeats", "--mixup-alpha": "--mixup", "--cutmix-alpha": "--cutmix", "--scale": "--crop-scale",
    "--ratio": "--crop-ratio", "--print-freq": "--log-every", "--log-interval": "--log-every",
    "--log-every-n-steps": "--log-every", "--checkpoint-hist": "--keep", "--dist-backend": "--backend",
    "--timeout": "--collective-timeout", "--gpu": "--gpus", "--accelerator": "--device", "--nodes": "--nnodes",
    "--num-nodes": "--nnodes",
}  # fmt: skip
# what has no flag here, or another meaning -> how it is said here
ADVICE = {
    "--amp": "mixed precision is --precision bf16 here (or fp16, with a gradient scaler)",
    "--half": "that is --precision fp16 here",
    "--weights": "that is --init pretrained:TAG here, or --init FILE",
    "--aa": "that is --augment randaugment:2,9 here, or another of torchvision's transforms",
    "--auto-augment": "that is --augment trivialaugmentwide here, or another of torchvision's transforms",
    "--color-jitter": "that is --augment colorjitter:0.4,0.4,0.4 here",
    "--reprob": "that is --augment randomerasing:0.25 here",
    "--random-erase": "that is --augment randomerasing:0.1 here",
    "--norm-weight-decay": "--decay-norms no leaves norms and biases without weight decay",
    "--data": "--data-dir DIR says where data lies; your own class folders: `lockstep train photos --data-dir DIR`",
    "--devices": "that is --nproc N here, or --gpus 0,2 for these GPUs",
    "--evaluate": "a run's weights are evaluated by `lockstep eval RUN`",
    "--test-only": "a run's weights are evaluated by `lockstep eval RUN`",
    "--distributed": "there is nothing to switch on: --nproc says how many processes (default: auto)",
    "--multiprocessing-distributed": "there is nothing to switch on: --nproc says how many processes (default: auto)",
    "--local-rank": "a launcher says that by LOCAL_RANK, and Lockstep reads it; start processes by --nproc",
    "--world-size": "that is --nproc here, processes on each machine, and --nnodes, machines",
    "--rank": "that is --node-rank here, the machine's number, with --nnodes",
    "--dist-url": "that is --master-addr and --master-port here",
    "--model-ema": "that is --ema 0.9999 here",
    "--deterministic": "the same command gives the same run; --exact 8 does so on any number of processes up to 8",
    "--sync-batchnorm": "batch norm over all processes is the default here; --batch-norm says it",
    "--num-classes": "classes are counted from the data",
    "--tensorboard": "that is --log tensorboard here",
    "--wandb": "that is --log wandb here",
}


@dataclass
class Parsed:
    """A command line, read: its words that are no flags, the flags' values, and the help that it asks for."""

    names: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    help: str | None = None  # the section of `--help SECTION`; empty: of none in particular


def parse_words(words: Sequence[str], flags: Mapping[str, Flag], script: bool = False) -> Parsed:
    """Read the words of a command line by these flags, which stand by each of their names.

    `script`: the first word that is no flag and all that follows belong together, as a program and its arguments.
    Raises UserError for an unknown flag, one without its value, or a value that it does not take.
    """
    queue, found = deque(words), Parsed()
    topics = {"all", "run", *(flag.group for flag in flags.values())} - {"", "config"}
    while queue:
        word = queue.popleft()
        if not word.startswith("-"):
            if not script and (bare := word.lstrip("\u2012\u2013\u2014\u2212")) != word:  # as text editors write --
                raise UserError(f"{word} begins with a dash, not with hyphens", f"Type it: --{bare.lstrip('-')}.")
            found.names.append(word)
            if script:
                found.names += queue
                break
            continue
        typed, equals, text = word.partition("=")
        typed = typed.replace("_", "-")
        if typed in ("-h", "--help"):
            found.help = text or (queue.popleft() if queue and queue[0] in topics else "")
            continue
        if typed in SHORT and SHORT[typed][0] in flags and not equals:
            typed, text = SHORT[typed]
            equals = "="
        flag = flags.get(typed) or flags.get(HABITS.get(typed, ""))
        if flag is None:
            if typed in ADVICE:
                raise UserError(f"{typed}: {ADVICE[typed]}")
            raise unknown("flag", typed, flags, "`--help all` lists them.")
        if flag.kind is bool:
            if equals:
                raise UserError(f"{word}: the flag takes no value", f"Give {typed} or leave it out.")
            found.values[flag.field] = not typed.startswith("--no-")
            continue
        if not equals:
            if not queue or queue[0].replace("_", "-") in flags:
                raise UserError(f"{typed} stands without its value", f"Give it as {typed} VALUE.")
            text = queue.popleft()
        while flag.arg.words and not equals and queue and not queue[0].startswith("-"):
            text += f" {queue.popleft()}"
        value = flag.read(text)
        if flag.many and flag.kind is str:  # names may come one by one
            value = (*found.values.get(flag.field, ()), *value)
        found.values[flag.field] = value
    return found


def as_command(command: str, flags: Sequence[Sequence[str]]) -> str:
    """A command for the shell, one flag a line."""
    return " \\\n".join([command, *(f"  {shlex.join(words)}" for words in flags)])


def habits_of(flag: Flag) -> list[str]:
    """What a flag is called elsewhere and may be called here, short names first."""
    return sorted((habit for habit, name in HABITS.items() if name == flag.name), key=len)
