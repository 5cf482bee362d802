"""`lockstep recipes` and `lockstep show`: what can be trained without writing anything, and how a run was trained."""

from pathlib import Path

from lockstep.commands.shared.helping import asked
from lockstep.config import Config
from lockstep.config.flags import as_command
from lockstep.config.recipes import RECIPES, recipe
from lockstep.config.toml import applied, read_values, to_toml
from lockstep.errors import UserError, unknown


def main(args: list[str]) -> int:
    """List the recipes."""
    if asked(args) is not None:
        print("usage: lockstep recipes\n\nList the recipes; `lockstep show RECIPE` prints one, to copy and change.")
        return 0
    if args:
        raise UserError(f"recipes takes no arguments, got {' '.join(args)}", "`lockstep show RECIPE` prints one.")
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').splitlines()[0]}")
    return 0


def show(args: list[str]) -> int:
    """Print a recipe, or a run's config, as a command or as TOML."""
    if asked(args) is not None:
        print(
            "usage: lockstep show [RECIPE|RUN] [--toml]\n\nPrint a recipe, or what a run was trained by, as a command "
            "with all its flags, or with --toml as a file for --config, to copy and change."
        )
        return 0
    names = [word for word in args if word != "--toml"]
    if flags := [word for word in names if word.startswith("-")]:
        raise unknown("flag", flags[0], ["--toml"])
    if len(names) > 1:
        raise UserError(f"show takes one recipe, got {' '.join(names)}", "As `lockstep show mnist`.")
    name = names[0] if names else "digits"
    run = Path(name, "config.json")
    if name not in RECIPES and run.is_file():
        config = applied(read_values(str(run)), Config(recipe=""), str(run))
        name = config.recipe
    else:
        config = recipe(name)
    if "--toml" in args:
        print(to_toml(config), end="")
        return 0
    for line in ((RECIPES[name].__doc__ or "") if name in RECIPES else name).strip().splitlines():
        print(f"# {line.strip()}".rstrip())
    print(as_command(f"lockstep train {name}", config))
    return 0
