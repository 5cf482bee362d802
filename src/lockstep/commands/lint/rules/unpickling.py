"""Files that are unpickled, which may run any code."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.loading import of_data
from lockstep.commands.lint.rules.states import as_load, loads
from lockstep.commands.lint.tree import text_of

_PICKLES = re.compile(r"^(c?[pP]ickle|_pickle|dill|cloudpickle|joblib)\.(load|loads|Unpickler)$|^pandas\.read_pickle$")
_PASSING_ON = ("load", "load_from_checkpoint", "load_state_dict_from_url", "partial", "fit")  # to torch.load
_SWITCH = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_READS = ("open", "read", "read_bytes", "urlopen")  # what hands loads() a file's bytes
_WRITES = ("dump", "dumps", "to_pickle", "save", "savez", "write_bytes")


@rule(
    "LS405",
    "pickle-load",
    "a file is unpickled, and not as weights alone",
    result="a file from elsewhere can run any code as it is loaded",
    why="pickle calls what the file names; torch.load does so with weights_only=False",
    mend='torch.load(path, map_location="cpu", weights_only=True)',
)
def pickle_load(program: Program) -> Iterator[Hit]:
    """torch.load with weights_only=False, of what is no data set's cache; pickle itself, of what the program reads.

    Without the argument torch has unpickled weights alone since 2.6, and before 1.13 there was none.
    """
    for name in ("load", "loads", "Unpickler", "read_pickle"):
        for call in program.named.get(name, []):
            full = qualified(program, call.func)
            arrays = full == "numpy.load" and constant(program, given(program, call, "allow_pickle", 2)) is True
            if (_PICKLES.match(full) or arrays) and _from_elsewhere(program, call, full):
                yield Hit(call, full)
    for call in loads(program):
        seen = as_load(program, call)
        safe = _told(program, call, seen)
        other = given(program, seen, "pickle_module", 2)
        foreign = other is not None and constant(program, other) is not None and safe is not False
        if (safe is False or (foreign and safe is ...)) and not of_data(program, call):
            yield Hit(call, "by another pickle module" if foreign else "")
    yield from _passed_on(program)


def _told(program: Program, call: ast.Call, seen: ast.Call) -> object:
    """What a torch.load is told of weights_only: here, or later in the dictionary that is spread into it."""
    said = given(program, seen, "weights_only")
    later = [
        bound.value
        for each in seen.keywords
        if each.arg is None and isinstance(each.value, ast.Name)
        for bound in program.owner[call].attributes.get(f"{each.value.id}['weights_only']", [])
        if function_of(program.owner[call], bound.node) is function_of(program.owner[call], call)
    ]
    value = constant(program, said) if said is not None or not later else ...
    if said is None and len(later) == 1 and isinstance(later[0], ast.expr):
        value = constant(program, later[0])
    return bool(value) if isinstance(value, bool | int) else value


def _passed_on(program: Program) -> Iterator[Hit]:
    """weights_only=False given to what hands it to torch.load, and torch's switch for all files."""
    known = set(loads(program))
    seen = {each for call in known for each in as_load(program, call).keywords}
    for name in _PASSING_ON:
        for call in program.named.get(name, []):
            word = next((each for each in call.keywords if each.arg == "weights_only"), None)
            if call in known or word is None or word in seen or constant(program, word.value) is not False:
                continue
            inner = qualified(program, call.args[0]) if call.args else ""
            outer = isinstance(call.func, ast.Attribute) and not qualified(program, call.func).endswith(".py")
            if (name == "partial" and inner == "torch.load") or (name != "partial" and outer):
                yield Hit(call)
    yield from _spread(program)
    for source in program.sources if known else []:
        if _SWITCH in source.text:
            for node in source.of(ast.Assign, ast.Call):
                if _switches(program, node):
                    yield Hit(node, "in all files that name no weights_only")


def _spread(program: Program) -> Iterator[Hit]:
    """weights_only=False given to a local function whose **keywords go to torch.load."""
    for call in loads(program):
        function = function_of(program.owner[call], call)
        spread = {each.value.id for each in call.keywords if each.arg is None and isinstance(each.value, ast.Name)}
        if function is None or function.args.kwarg is None or function.args.kwarg.arg not in spread:
            continue
        for outer in program.named.get(function.name, []):
            words = [each.value for each in outer.keywords if each.arg == "weights_only"]
            if words and constant(program, words[0]) is False:
                yield Hit(outer)


def _switches(program: Program, node: ast.AST) -> bool:
    """Whether a statement or a call sets torch's switch in the environment."""
    match node:
        case ast.Assign(targets=[target, *_], value=value) if _SWITCH in text_of(target):
            return constant(program, value) in ("1", "true", "y")
        case ast.Call(func=ast.Attribute(attr="setdefault"), args=[ast.Constant(value=str(name)), value]):
            return name == _SWITCH and constant(program, value) in ("1", "true", "y")
    return False


def _from_elsewhere(program: Program, call: ast.Call, full: str) -> bool:
    """Whether pickle reads a file that the program has not written itself."""
    if not step_loops(program):
        return _used(program, call)
    if any(each.arg == "encoding" for each in call.keywords):
        return _used(program, call)  # Python 2's pickles: published data sets, as CIFAR-10's
    if full.endswith(".loads"):
        read = call.args and depends(program, call.args[0], _reads)
        return bool(read) and not _packs(program)
    return not _packs(program) or _used(program, call)


def _reads(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in _READS


@remembered
def _packs(program: Program) -> bool:
    """Whether the program pickles something as well: what it reads may be its own."""
    names = {name for name in _WRITES for call in program.named.get(name, []) if _pickles(program, call)}
    return bool(names)


def _pickles(program: Program, call: ast.Call) -> bool:
    full = qualified(program, call.func)
    return full.partition(".")[0] in ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "numpy") or (
        last_name(call.func) == "to_pickle" and not full
    )


def _used(program: Program, call: ast.Call) -> bool:
    """Whether what is read is loaded into a network or an optimizer."""
    into = [arg for each in program.named.get("load_state_dict", []) for arg in each.args]
    return any(depends(program, each, lambda node: node is call) for each in into)
