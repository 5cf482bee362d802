"""`lockstep completion`: what bash and zsh need to complete commands, recipes, flags and their values."""

import shlex
from collections.abc import Mapping

from lockstep.commands.shared.helping import asked
from lockstep.config import Config
from lockstep.config.evaluation import Evaluation
from lockstep.config.flags import HABITS, Flag, known_flags
from lockstep.config.recipes import RECIPES
from lockstep.errors import UserError

SHELLS = ("bash", "zsh")
_SCRIPT = """# completion of lockstep, by `lockstep completion {shell}`
{before}_lockstep() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={commands}
  else
    case "$before" in
{values}    *)
      case "$word" in
        -*) case "${{COMP_WORDS[1]}}" in
{flags}          *) words={train} ;;
          esac ;;
        *) case "${{COMP_WORDS[1]}}" in
          {with_recipes}) words={recipes} ;;
          esac ;;
      esac ;;
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o default -F _lockstep lockstep
"""


def main(args: list[str], commands: Mapping[str, str]) -> int:
    """Print the completion of a shell; `commands`: name -> usage."""
    if asked(args) is not None:
        print(
            f"usage: lockstep completion {'|'.join(SHELLS)}\n\nPrint what completes commands and flags; evaluate it in"
        )
        print('~/.bashrc or ~/.zshrc: eval "$(lockstep completion bash)".')
        return 0
    if len(args) != 1 or args[0] not in SHELLS:
        raise UserError(f"completion takes a shell, got {' '.join(args) or 'none'}", "As `lockstep completion bash`.")
    print(script(args[0], commands), end="")
    return 0


def script(shell: str, commands: Mapping[str, str]) -> str:
    """The script; zsh runs bash's."""
    train = known_flags(Config)
    values = "".join(
        f"    {'|'.join(_typed(name, flag))}) words={shlex.quote(' '.join(flag.choices))} ;;\n"
        for name, flag in train.items()
        if flag.choices and name == flag.names[0]
    )
    own = {"eval": known_flags(Evaluation), "runs": {}, "watch": {}, "diff": {}}
    from lockstep.commands import diff, runs, watch

    own |= {
        "runs": known_flags(runs.Listing),
        "watch": known_flags(watch.Watching),
        "diff": known_flags(diff.Comparison),
    }
    flags = "".join(f"          {name}) words={_words(found)} ;;\n" for name, found in own.items())
    return _SCRIPT.format(
        shell=shell,
        before="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=shlex.quote(" ".join(commands)),
        values=values,
        flags=flags,
        train=_words(train),
        with_recipes="|".join(name for name, usage in commands.items() if "RECIPE" in usage),
        recipes=shlex.quote(" ".join(RECIPES)),
    )


def _words(flags: Mapping[str, Flag]) -> str:
    return shlex.quote(" ".join([*sorted(flags), "--help"]))


def _typed(name: str, flag: Flag) -> list[str]:
    return [*flag.names, *(habit for habit, long in HABITS.items() if long == name)]
