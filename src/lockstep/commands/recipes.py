"""`lockstep recipes` and `lockstep show`: what can be trained without writing anything."""

from lockstep.config.flags import as_command
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError


def main(args: list[str]) -> int:
    """List the recipes."""
    if {"-h", "--help"} & set(args):
        print("usage: lockstep recipes\n\nList the recipes; `lockstep show RECIPE` prints one, to copy and change.")
        return 0
    if args:
        raise UserError(f"recipes takes no arguments, got {' '.join(args)}", "`lockstep show RECIPE` prints one.")
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').splitlines()[0]}")
    return 0


def show(args: list[str]) -> int:
    """Print a recipe as a command."""
    if {"-h", "--help"} & set(args):
        print("usage: lockstep show [RECIPE]\n\nPrint a recipe as a command with all its flags, to copy and change.")
        return 0
    if len(args) > 1:
        raise UserError(f"show takes one recipe, got {' '.join(args)}", "As `lockstep show mnist`.")
    name = args[0] if args else "digits"
    config = recipe(name)
    for line in ((RECIPES[name].__doc__ or "") if name in RECIPES else name).strip().splitlines():
        print(f"# {line.strip()}".rstrip())
    print(as_command(f"lockstep train {name}", config))
    return 0
