"""What `--help`, `--help SECTION` and `--help all` print. Sections are the groups of a config. Imports no torch."""

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.config import Config
from lockstep.config.flags import HABITS, Flag, flags_of, hidden_fields
from lockstep.errors import UserError, unknown

_NAMES = 26  # columns before the explanations
_WIDEST = 100
RUN = "run"  # the section of a config's own fields
_SHORT = {"a whole number": "N", "a number": "X", "a name": "NAME"}

# by task: the flags that most runs need, each in a line
EVERYDAY: dict[str, dict[str, str]] = {
    "what": {
        "--dataset": "data set; folder takes class folders of your own",
        "--data-dir": "where it lies, or is put",
        "--val-fraction": "part of it to validate on, where it has no val/",
        "--model": "of this package, torchvision or timm, or your own",
        "--init": "weights to begin with: pretrained, or a file",
    },
    "how": {
        "--epochs": "passes over the training set",
        "--batch-size": "images a step, all processes together",
        "--lr": "peak learning rate",
        "--optimizer": "sgd, adam, adamw, muon, timm:NAME ...",
        "--weight-decay": "decay of the weights",
        "--schedule": "how the rate falls: cosine, step, one-cycle ...",
        "--augment": "torchvision's transforms, as randaugment:2,9",
        "--precision": "fp32, tf32, bf16 (mixed precision) or fp16",
        "--accumulate": "cut a batch in so many parts; auto finds how many",
        "--patience": "end after so many evaluations without a better",
        "--seed": "of weights, order, augmentation and dropout",
    },
    "where": {
        "--nproc": "processes on this machine",
        "--gpus": "which GPUs, as 0,2",
        "--workers": "processes that read pictures, for each of them",
        "--exact": "the same bits on any number of processes up to it",
        "--out": "run folder; a run that is there goes on",
        "--log": "csv, tensorboard, wandb, mlflow, trackio",
    },
}
_EXAMPLES = """examples:
  lockstep train mnist --nproc 2 --epochs 3
  lockstep train photos --data-dir ~/flowers
  lockstep train cifar10 --gpus 0,1 --precision bf16 --out runs/mine"""


def asked(args: Sequence[str]) -> str | None:
    """The section that is asked about; empty for none in particular, None where no help is wanted."""
    for word in args:
        if word in ("-h", "--help"):
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def joined(args: Sequence[str]) -> list[str]:
    """The arguments with `--help SECTION` as one word: where it stands apart it would be taken for a recipe."""
    out: list[str] = []
    for word in args:
        if out and out[-1] in ("-h", "--help") and word in _topics():
            out[-1] = f"--help={word}"
        else:
            out.append(word)
    return out


@functools.cache
def _topics() -> frozenset[str]:
    return frozenset({"all", RUN, *(item.name for item in dataclasses.fields(Config))} - {"recipe"})


def sections(cls: type, default: Any, hidden: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any, list[Flag]]]:
    """(name, group, its flags) of what a command takes: "" for its own, and the groups of the config in it."""
    own = RUN if isinstance(default, Config) else ""
    flags = [flag for flag in flags_of(type(default), hidden) if _field(flag) in vars(default)]
    yield own, default, [flag for flag in flags if not dataclasses.is_dataclass(getattr(default, _field(flag)))]
    for item in dataclasses.fields(default):
        group = getattr(default, item.name)
        if dataclasses.is_dataclass(group):
            for name, inner, theirs in sections(type(group), group, hidden | hidden_fields(cls)):
                yield (name if name else item.name), inner, theirs


def _field(flag: Flag) -> str:
    return flag.names[0].removeprefix("--").replace("-", "_")


def text(cls: type, default: Any, topic: str, prog: str, about: str) -> str:
    """The help on a section, or, where none is named, the everyday one. Raises UserError for an unknown section."""
    width = min(_WIDEST, max(60, shutil.get_terminal_size((80, 24)).columns))
    found = {name: (group, flags) for name, group, flags in sections(cls, default)}
    names = [name for name in found if name]
    head = [f"usage: {prog} [FLAGS]", "", *textwrap.wrap(about, width)]
    if topic:
        if topic not in names:
            raise unknown("section", topic, names, f"--help all, or one of {', '.join(names)}.")
        group, flags = found[topic]
        return "\n".join([*head, "", f"{topic}:", *_explained(group, flags, width), ""])
    more = textwrap.wrap(f"More: --help all, or a section: --help {', '.join(names)}.", width)
    if isinstance(default, Config):
        count = sum(len(flags) for _, flags in found.values())
        more = textwrap.wrap(f"All {count} flags: --help all; by section: --help {', '.join(names)}.", width)
        return "\n".join([*head, "", *_everyday(found, width), "", _EXAMPLES, "", *more, ""])
    own = _explained(*found[""], width)
    return "\n".join([*head, "", *own, "", *more, ""])


def _everyday(found: dict[str, tuple[Any, list[Flag]]], width: int) -> Iterator[str]:
    values = {flag.names[0]: (group, flag) for group, flags in found.values() for flag in flags}
    for task, lines in EVERYDAY.items():
        yield f"{task}:"
        for name, says in lines.items():
            group, flag = values[name]
            value = getattr(group, _field(flag))
            end = f" [{_default(group, flag)}]" if value or isinstance(value, float) else ""
            short = next((habit for habit, long in HABITS.items() if long == name and len(habit) == 2), "")
            names = f"{short}, {name}" if short else f"    {name}"
            line = f"  {names:<20}{says}"
            yield line + end if len(line + end) <= width else line


def _explained(group: Any, flags: Sequence[Flag], width: int) -> Iterator[str]:
    docs = _docs(type(group))
    for flag in flags:
        says = " ".join(docs.get(_field(flag), "").split())
        shown = _default(group, flag)
        says = f"{says} [{shown}]" if shown else says
        others = [habit for habit, long in HABITS.items() if long == flag.names[0]]
        names = ", ".join([*others, *flag.names]) + (f" {_value(group, flag)}" if flag.takes_value else "")
        wrapped = textwrap.wrap(says, width - _NAMES, break_on_hyphens=False)
        if len(names) + 4 > _NAMES:
            yield f"  {names}"
            names = ""
        yield f"  {names:<{_NAMES - 2}}{wrapped[0] if wrapped else ''}".rstrip()
        yield from (" " * _NAMES + line for line in wrapped[1:])


def _hints(group: Any, flag: Flag) -> list[Any]:
    hint = typing.get_type_hints(type(group), include_extras=True)[_field(flag)]
    return list(getattr(hint, "__metadata__", ()))


def _value(group: Any, flag: Flag) -> str:
    for extra in _hints(group, flag):
        if metavar := getattr(extra, "metavar", None):
            return str(metavar)
    if flag.choices and len("|".join(flag.choices)) <= 60:
        return "|".join([*flag.choices, *([_SHORT[flag.described]] if flag.described in _SHORT else [])])
    return _SHORT.get(flag.described, "NAME")


def _default(group: Any, flag: Flag) -> str:
    """The value of a flag that is not given; by a hint of its field where that is not empty."""
    value = getattr(group, _field(flag))
    if value in ("", ()):
        hints = (getattr(extra, "help_behavior_hint", None) for extra in _hints(group, flag))
        said = str(next((hint for hint in hints if hint), ""))
        return "" if "none" in said else said.strip("()").removeprefix("default: ")
    if isinstance(value, bool):
        return "on" if value else "off"
    return (
        ",".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _docs(cls: type) -> dict[str, str]:
    """Field -> the docstring below it, of a class and those that it inherits from."""
    found: dict[str, str] = {}
    for each in (each for each in reversed(cls.__mro__) if dataclasses.is_dataclass(each)):
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]).body
        for field, below in itertools.pairwise(body):
            said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(said, str):
                found[field.target.id] = said
    return found


def refuse_sections(topic: str) -> None:
    """Raise UserError for `--help SECTION` where a command's flags have none."""
    if topic not in ("", "all"):
        raise UserError(f"--help {topic}: this command's flags have no sections", "Leave the name out.")
