"""What all commands share: reading their arguments, starting processes, and how they end."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from lockstep.config import Config
from lockstep.config.changes import changed, flags_for
from lockstep.config.fields import Arg, flag_names, flags_of, require, with_values
from lockstep.config.files import entries, read_values
from lockstep.config.flags import parse_words
from lockstep.config.recipes import RECIPES, recipe
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.files import named, require_local
from lockstep.distributed.output import for_people, output_is_required, with_required_output
from lockstep.errors import UserError, is_url, redacted, shown

_PRINTING_S = 10.0  # that a silent process lives on: when one ends, torchrun ends the others, also the one that prints
# networks that others name where a recipe stands here, by how their names begin
_NETWORKS = re.compile(
    "(wide_)?res(net|next)|vgg|alexnet|densenet|mobilenet|efficientnet|convnext|vit_|vit-|swin|regnet|inception|googlenet|"
    "squeezenet|shufflenet|mnasnet|maxvit|deit|beit|eva|digits_net|mnist_net"
)


class HelpAsked(Exception):
    """A command line asks for help. The command line's front prints it."""

    def __init__(self, default: Any, topic: str, about: str) -> None:
        super().__init__(topic)
        self.default, self.topic, self.about = default, topic, about  # whose fields are the flags; "": no section


@dataclass(frozen=True)
class NoFlags:
    """What a command without flags takes."""


@dataclass(frozen=True)
class Source:
    """Where the values come from that flags change."""

    config: Annotated[str, Arg(metavar="FILE")] = ""
    """A TOML file, or a run's config.json, whose values flags change."""
    trust_code: bool = False
    """Import and call the code that a config.json names, as --model package.module:factory did."""


def parse(default: Any, args: Sequence[str], about: str = "", script: bool = False) -> tuple[list[str], Any]:
    """The words that are no flags, and the dataclass that the flags make of `default`.

    `about` explains the command in its help. `script`: all from the first such word on stays together.
    Raises HelpAsked where the words ask for it, and UserError for what the flags don't take.
    """
    found = parse_words(args, flag_names(default), script)
    if found.help is not None:
        raise HelpAsked(default, found.help, about)
    return found.names, with_values(default, found.values)


def print_error(message: str, once_a_host: bool = False) -> None:
    """A line on standard error. `once_a_host`: torchrun's processes all meet the same error, and one prints it."""
    if once_a_host and "TORCHELASTIC_RUN_ID" in os.environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # in half an environment nobody else prints
        if all(os.environ.get(name, "").isdigit() for name in names) and os.environ["LOCAL_RANK"] != "0":
            time.sleep(_PRINTING_S)
            return
    text = shown(redacted(message), keep="\n")
    print(for_people(f"lockstep: {text}", sys.stderr), file=sys.stderr, flush=True)


def local_run(args: list[str]) -> list[str]:
    """A command's words with the run at an address, which follows its name, as a folder of this machine."""
    if not is_url(args[1] if len(args) > 1 else ""):
        return args
    from lockstep.checkpoint.remote import fetched

    return [args[0], str(fetched(args[1])), *args[2:]]


def _note(command: str, lines: Sequence[str]) -> None:
    """Lines for who types a command, by one of a launcher's processes; where output is a product, beside it."""
    if os.environ.get("RANK", "0") == "0":
        stream = sys.stdout if command == "train" else sys.stderr
        for line in lines:
            print(for_people(f"note: {line}", stream), file=stream)


def print_failure(failed: WorkerFailed) -> int:
    """Print what a worker left of its failure; returns the exit code."""
    if failed.trace:
        print(shown(failed.trace, keep="\n"), file=sys.stderr)
    print_error(str(failed))
    return failed.exit_code


def one_name(command: str, what: str, names: list[str], example: str = "") -> str:
    """The one word that is no flag; where there is none empty, or an error with an example."""
    if len(names) > 1:
        remedy = f"As `lockstep {command} {example or '... --epochs 3'}`: values follow a flag."
        raise UserError(f"{command} takes one {what}, got {' '.join(names)}", remedy)
    if "" in names:
        raise UserError(f"{command}: the {what} is an empty text", "Name one, or leave it out.")
    if example and not names:
        raise UserError(f"{command} needs a {what}", f"As `lockstep {command} {example}`.")
    return names[0] if names else ""


def planned(
    command: str, of: Callable[[Config], Any], args: Sequence[str], about: str = "", takes_run: bool = False
) -> Any:
    """The plan of a command around a recipe: `of` makes one of the recipe's config; a file and flags change it.

    A config.json may be a stranger's: code that it names wants `--trust-code`. A TOML file is the user's own words.
    `takes_run`: a run folder may stand in the recipe's place.
    """
    default = of(Config())
    found = parse_words(args, {**flag_names(Source), **flag_names(default)})
    name, values = one_name(command, "recipe", found.names), found.values
    source = with_values(Source(), {flag: values.pop(flag) for flag in ("config", "trust_code") if flag in values})
    config = _base(command, name, source, takes_run)
    if found.help is not None:
        raise HelpAsked(of(config), found.help, about.format(config.recipe))
    own = {field for field, flag in flags_of(default).items() if not flag.group and flag.owner is not Config}
    typed, lines = changed(config, {field: value for field, value in values.items() if field not in own})
    _note(command, lines)
    return _settled(with_values(of(config), values | typed))


def _base(command: str, name: str, source: Source, takes_run: bool) -> Config:
    """The config that flags change: a recipe's, with a file's values, or a run's."""
    if takes_run and name and (named(name) / "config.json").is_file():
        from lockstep.training.run_folder import read_config

        require(not source.config, f"{command} of {name} has that run's config", "Leave --config out.")
        return read_config(name, source.trust_code)
    file, values = source.config, read_values(source.config) if source.config else {}
    typed = entries(values, Config, file)
    name = name or str(typed.pop("recipe", "digits"))
    if file.endswith(".json") and not source.trust_code:
        from lockstep.training.run_folder import require_trusted

        require_trusted(Config.from_dict(values, file), file, trust_code=False)
    _refuse_what_is_no_recipe(command, name)
    base = recipe(name)
    try:
        typed, lines = changed(base, {field: value for field, value in typed.items() if field != "recipe"})
    except UserError as error:
        raise UserError(f"{file}: {error.message}", error.remedy) from error
    _note(command, lines)
    config: Config = with_values(base, typed)
    if command != "train":
        require_local(config.execution.out, "--out")
    return config


def _refuse_what_is_no_recipe(command: str, name: str) -> None:
    """Raise UserError for a network, a folder or a file where a recipe stands, with what to type instead."""
    if name in RECIPES or ":" in name:
        return
    path = named(name)
    if (path / "config.json").is_file():
        remedy = f"Go on with it: `lockstep {command} --config {name}/config.json --out {name}`."
        raise UserError(f"{name} is a run folder, not a recipe", remedy)
    if path.is_dir():
        raise UserError(
            f"{name} is a folder, not a recipe",
            f"Class folders of your own: `lockstep {command} photos --data-dir {name}`.",
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


def refuse_launched(command: str, remedy: str = "Run it without torchrun or mpirun.") -> None:
    """Raise UserError where a launcher has started this process: the command starts its own."""
    from lockstep.distributed.environment import launcher_ranks

    if launcher_ranks():
        raise UserError(f"{command} starts its own processes, and a launcher has started this one", remedy)


def train_arguments(config: Config) -> list[str]:
    """What `lockstep` trains by this config with: the recipe, and the flags that it does not have so already."""
    flags = flags_for(config, recipe(config.recipe))
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
    from lockstep.distributed.launcher import launch

    if output_is_required():
        fn = partial(with_required_output, fn)  # a worker has streams of its own
    stopped = max(value or 0 for value in launch(partial(without_exit, fn), *args, **how))
    return 128 + stopped if stopped else 0
