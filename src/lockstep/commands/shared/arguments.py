"""What all commands share: reading their arguments, starting processes, and how they end."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.commands.shared import helping
from lockstep.config import Config
from lockstep.config.flags import changed_flags, hidden_fields, split_arguments
from lockstep.config.recipes import RECIPES, recipe
from lockstep.config.toml import applied, read_values, take_file
from lockstep.errors import UserError
from lockstep.processes.failures import WorkerFailed
from lockstep.processes.files import named

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

_PRINTING_S = 10.0  # that a silent process lives on: when one ends, torchrun ends the others, also the one that prints


def print_error(message: str, once_a_host: bool = False) -> None:
    """A line on standard error. `once_a_host`: torchrun's processes all meet the same error, and one prints it."""
    if once_a_host and "TORCHELASTIC_RUN_ID" in os.environ and _another_prints():
        time.sleep(_PRINTING_S)
        return
    print(f"lockstep: {message}", file=sys.stderr, flush=True)


def _another_prints() -> bool:
    """True on torchrun's processes but a host's first; in half an environment there is no other one."""
    whole = all(os.environ.get(name, "").isdigit() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return whole and os.environ["LOCAL_RANK"] != "0"


def print_failure(failed: WorkerFailed) -> int:
    """Print what a worker left of its failure; returns the exit code."""
    if failed.trace:
        print(failed.trace, file=sys.stderr)
    print_error(str(failed))
    return failed.exit_code


def one_name(command: str, what: str, names: list[str]) -> str:
    """The one positional argument; empty where there is none."""
    if len(names) > 1:
        raise UserError(f"{command} takes one {what}, got {' '.join(names)}", "Values follow a flag: --epochs 3.")
    if "" in names:
        raise UserError(f"{command}: the {what} is an empty text", "Name one, or leave it out.")
    return names[0] if names else ""


def script_among(args: list[str], cls: type) -> tuple[list[str], str, list[str]]:
    """The flags of `cls` that stand before a script, the script (empty: none is named), and all that follows, its own.

    The script is the first word that is neither a flag nor a flag's value.
    """
    for place, word in enumerate(args):
        if not word.startswith("-") and _whole(args[:place], cls) and split_arguments(args[: place + 1], cls)[0]:
            return args[:place], word, args[place + 1 :]
    return args, "", []


def _whole(words: list[str], cls: type) -> bool:
    """Whether no flag at the end of these words still wants its value."""
    try:
        split_arguments(words, cls)
    except UserError as error:
        return "without its value" not in error.message
    return True


def parse(cls: type, default: Any, args: list[str], prog: str, description: str) -> Any:
    """The dataclass that the flags make of `default`; prints the help and ends where they ask for it."""
    topic = helping.asked(args)
    if (
        topic is not None
        and topic != "all"
        and any(dataclasses.is_dataclass(value) for value in vars(default).values())
    ):
        print(helping.text(cls, default, topic, prog, description), end="")
        raise SystemExit(0)
    helping.refuse_sections(topic or "")
    args = ["--help"] if topic is not None else args
    import tyro
    from tyro.conf import OmitArgPrefixes, SuppressFixed

    how: dict[str, Any] = {"config": (OmitArgPrefixes, SuppressFixed), "registry": _without_hidden(cls)}
    return tyro.cli(cls, default=default, args=args, prog=prog, description=description, **how)


def _without_hidden(cls: type) -> "ConstructorRegistry":
    """tyro's rules for flags, and one more: a hidden field of a config in `cls` is none, and keeps its value."""
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

    hidden, registry, asked = hidden_fields(cls), ConstructorRegistry(), object()

    @registry.struct_rule
    def visible(info: StructTypeInfo) -> StructConstructorSpec | None:
        names = hidden.intersection(getattr(info.type, "__dataclass_fields__", ()))
        if not names or info.type is cls or asked in info.markers:
            return None
        others = registry.get_struct_spec(dataclasses.replace(info, markers=(*info.markers, asked)))
        assert isinstance(others, StructConstructorSpec)
        fields = tuple(field for field in others.fields if field.name not in names)

        def made(**values: Any) -> Any:
            return dataclasses.replace(info.default, **values)

        made.__doc__ = info.type.__doc__  # the help's
        return StructConstructorSpec(made, fields)

    return registry


def planned(command: str, cls: type, of: Callable[[Config], Any], args: list[str], description: str) -> Any:
    """The plan of a command around a recipe: `of` makes one from the recipe's config, a file and flags change it."""
    file, args = take_file(args)
    values = read_values(file) if file else {}
    names, rest = split_arguments(args, cls)
    name = one_name(command, "recipe", names) or str(values.get("recipe", "digits"))
    _refuse_what_is_no_recipe(command, name)
    config = applied(values, recipe(name), file) if file else recipe(name)
    if command in ("verify", "compare", "tune", "forecast", "lr-find") and _finds(config, rest):
        raise UserError(f"{command} with --accumulate auto: that is found by `lockstep train`", "Give a number.")
    about = f"{description.format(name)} --config FILE.toml, or a run's config.json, gives values that flags change."
    return _settled(parse(cls, of(config), rest, f"lockstep {command} {name}", about))


# networks that others name where a recipe stands here, by how their names begin
_NETWORKS = re.compile(
    "(wide_)?res(net|next)|vgg|alexnet|densenet|mobilenet|efficientnet|convnext|vit_|vit-|swin|regnet|inception|googlenet|"
    "squeezenet|shufflenet|mnasnet|maxvit|deit|beit|eva|digits_net|mnist_net"
)


def _refuse_what_is_no_recipe(command: str, name: str) -> None:
    """Raise UserError for a network, a folder or a file where a recipe stands, which says how that is meant."""
    if name in RECIPES or ":" in name:
        return
    path = named(name)
    if (path / "config.json").is_file():
        remedy = f"Go on with it: `lockstep {command} --config {name}/config.json --out {name}`."
        raise UserError(f"{name} is a run folder, not a recipe", remedy)
    if path.is_dir():
        raise UserError(
            f"{name} is a folder, not a recipe",
            f"Class folders of your own: `lockstep {command} photos --data-dir {name}`, and --val-fraction 0.1 where "
            "there is no val/.",
        )
    if path.suffix in (".toml", ".json") and path.is_file():
        raise UserError(f"{name} is a file, not a recipe", f"Give it as --config {name}.")
    if _NETWORKS.match(name.lower()):
        raise UserError(f"{name} is a network, not a recipe", f"As `lockstep {command} cifar10 --model {name}`.")


def _settled(plan: Any) -> Any:
    """The plan with what published weights decide, where its config may ask for some: that imports torch."""
    config: Config = plan if isinstance(plan, Config) else plan.config
    if not (config.model.init.startswith("pretrained") or "." in config.model.model):
        return plan
    from lockstep.training.pretrained import settled

    return settled(config) if isinstance(plan, Config) else dataclasses.replace(plan, config=settled(config))


def _finds(config: Config, words: list[str]) -> bool:
    """Whether the last word on --accumulate is auto."""
    said = [
        following if word == "--accumulate" else word.removeprefix("--accumulate=")
        for word, following in zip(words, [*words, ""][1:], strict=True)
        if word == "--accumulate" or word.startswith("--accumulate=")
    ]
    return said[-1] == "0" if said else config.accumulate == 0


def refuse_launched(command: str, remedy: str = "Run it without torchrun or mpirun.") -> None:
    """Raise UserError where a launcher has started this process: the command starts its own."""
    from lockstep.processes.environment import launcher_ranks

    if launcher_ranks():
        raise UserError(f"{command} starts its own processes, and a launcher has started this one", remedy)


def train_arguments(config: Config) -> list[str]:
    """What `lockstep` trains by this config with: the recipe, and the flags that it does not have so already."""
    flags = changed_flags(config, recipe(config.recipe))
    return ["train", config.recipe, *(argument for flag in flags for argument in flag)]


def start_training(config: Config, output: Path) -> subprocess.Popen[bytes]:
    """Start `lockstep train` by this config; what it prints is appended to a file."""
    command = [sys.executable, "-m", "lockstep", *train_arguments(config)]
    env = os.environ | {"COLUMNS": "120"}
    with output.open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env)


def launched(fn: Callable[..., Any], *args: Any, **how: Any) -> int:
    """Run `fn` on the run's processes; returns the exit code: 128 and the signal where one stopped them."""
    from lockstep.config.objects import without_exit
    from lockstep.processes.launcher import launch

    stopped = max(value or 0 for value in launch(partial(without_exit, fn), *args, **how))
    return 128 + stopped if stopped else 0
