"""`lockstep recipes` and `lockstep show`: what can be trained without writing anything, and how a run was trained."""

import inspect
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.shared import help
from lockstep.commands.shared.arguments import NoFlags, one_name, parse
from lockstep.config import Config
from lockstep.config.changes import flags_for
from lockstep.config.files import read_values, to_toml
from lockstep.config.flags import as_command
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError, shown


@dataclass(frozen=True)
class Show:
    """How to print it."""

    toml: bool = False
    """Print a TOML file with every value, for --config."""


def main(args: list[str]) -> int:
    """List the recipes."""
    names, _ = parse(NoFlags(), args, "List the recipes; `lockstep show RECIPE` prints one, to copy and change.")
    if names:
        raise UserError(f"recipes takes no arguments, got {' '.join(names)}", "`lockstep show RECIPE` prints one.")
    first = {name: (function.__doc__ or "").splitlines()[0] for name, function in RECIPES.items()}
    print("\n".join(help.rows([*first.items()], max(map(len, RECIPES)) + 4)))
    return 0


def show(args: list[str]) -> int:
    """Print a recipe, or a run's config, as a command or as TOML."""
    purpose = "Print a recipe, or what a run was trained by, as a command or a file, to copy and change."
    names, how = parse(Show(), args, purpose)
    name = one_name("show", "recipe or run folder", names) or "digits"
    file = Path(name, "config.json")
    of_run = name not in RECIPES and file.is_file()
    config = Config.from_dict(read_values(str(file)), str(file)) if of_run else recipe(name)
    if how.toml:
        print(to_toml(config), end="")
        return 0
    about = inspect.cleandoc((RECIPES[name].__doc__ or "") if name in RECIPES else name).split("\n\n")
    usual = config.recipe if of_run and config.recipe in RECIPES else ""
    flags = flags_for(config, recipe(usual) if usual else Config())
    about.append(f"what differs from {f'the recipe {usual}' if usual else 'the defaults'}; --toml has every value")
    print(shown("\n#\n".join(map(help.remark, about)), keep="\n"))
    print(shown(as_command(f"lockstep train {config.recipe}", flags), keep="\n"))
    return 0
