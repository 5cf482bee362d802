"""Files that are unpickled, which may run any code."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.program import Program, qualified
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.loading import of_data
from lockstep.commands.lint.rules.saving import loads
from lockstep.commands.lint.source import above, statement_of

_PICKLES = re.compile(r"^(pickle|dill|cloudpickle|joblib)\.(load|loads|Unpickler)$")
_PASSING_ON = ("load", "load_from_checkpoint", "load_state_dict_from_url", "partial", "fit")  # to torch.load
_SWITCH = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@rule(
    "LS405",
    "pickle-load",
    "a file is unpickled with weights_only=False",
    result="a checkpoint from elsewhere can run any code as it is loaded",
    why="weights_only=False lets pickle call what the file names",
    mend='torch.load(path, map_location="cpu", weights_only=True)',
)
def pickle_load(program: Program) -> Iterator[Hit]:
    """torch.load with weights_only=False, of what is no data set's cache; pickle itself, of a checkpoint.

    Without the argument torch has unpickled weights alone since 2.6, and before 1.13 there was none.
    """
    for name in ("load", "loads", "Unpickler"):
        for call in program.named.get(name, []):
            full = qualified(program, call.func)
            arrays = full == "numpy.load" and constant(program, given(program, call, "allow_pickle", 2)) is True
            if _PICKLES.match(full) or arrays:
                named = full.startswith(("pickle", "dill", "cloudpickle")) and _called_so(program, call)
                if named or _used(program, call):
                    yield Hit(call, full)
    for call in loads(program):
        whole = constant(program, given(program, call, "weights_only")) is False
        other = given(program, call, "pickle_module", 2)
        foreign = other is not None and constant(program, other) is not None and not whole
        if (whole or (foreign and constant(program, given(program, call, "weights_only")) is ...)) and not of_data(
            program, call
        ):
            yield Hit(call, "by another pickle module" if foreign else "")
    yield from _passed_on(program)


def _passed_on(program: Program) -> Iterator[Hit]:
    """weights_only=False given to what hands it to torch.load, and torch's switch for all files."""
    known = set(loads(program))
    for name in _PASSING_ON:
        for call in program.named.get(name, []):
            value = next((each.value for each in call.keywords if each.arg == "weights_only"), None)
            if call in known or value is None or constant(program, value) is not False:
                continue
            inner = qualified(program, call.args[0]) if call.args else ""
            outer = isinstance(call.func, ast.Attribute) and not qualified(program, call.func).endswith(".py")
            if (name == "partial" and inner == "torch.load") or (name != "partial" and outer):
                yield Hit(call)
    for source in program.sources if known else []:
        if _SWITCH in source.text:
            for node in source.nodes:
                switched = isinstance(node, ast.Assign) and _SWITCH in ast.unparse(node.targets[0])
                if switched and isinstance(node, ast.Assign) and constant(program, node.value) in ("1", "true", "y"):
                    yield Hit(node, "in all files that name no weights_only")


def _called_so(program: Program, call: ast.Call) -> bool:
    """Whether what pickle reads is a network's state by names around."""
    source = program.owner[call]
    near: list[ast.AST] = [statement_of(source, call)]
    near += [item for each in above(source, call) if isinstance(each, ast.With) for item in each.items]
    text = " ".join(map(ast.unparse, near)).lower()
    return bool(re.search(r"checkpoint|ckpt|snapshot|weights|state|model", text))


def _used(program: Program, call: ast.Call) -> bool:
    """Whether what is read is loaded into a network or an optimizer."""
    into = [arg for each in program.named.get("load_state_dict", []) for arg in each.args]
    return any(depends(program, each, lambda node: node is call) for each in into)
