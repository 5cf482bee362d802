"""The calls that write a file under a path that they are given: checkpoints of all kinds, exported networks, tables."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import given
from lockstep.commands.lint.rules.states import as_save, in_memory, saves
from lockstep.commands.lint.several import lightning
from lockstep.commands.lint.tree import text_of

_PLACES = {  # -> the place of the path and its name; the first argument is a state
    "safetensors.torch.save_file": (1, "filename"),
    "safetensors.torch.save_model": (1, "filename"),
    "torch.jit.save": (1, "f"),
}
_ARRAYS = ("numpy.save", "numpy.savez", "numpy.savez_compressed")


def written_files(program: Program) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """The calls that write a file, and its path; in Lightning's modules and callbacks, those of their hooks."""
    known = [(call, given(program, as_save(program, call), "f", 1)) for call in saves(program)]
    known = [(call, path) for call, path in known if not in_memory(program, call)]
    trains = bool(step_loops(program))
    exported = [each for each in _exported(program) if trains and program.owner[each[0]] is program.root]
    for call, path in [*known, *_others(program), *exported, *_pretrained(program)]:
        function = function_of(program.owner[call], call)
        hook = function is not None and function.name.startswith("on_")
        if not lightning(program) or hook or _after_fit(program, call):
            yield call, path


def _after_fit(program: Program, call: ast.Call) -> bool:
    """Whether a call stands below trainer.fit, where Lightning runs the whole script in each process."""
    strategies = [given(program, each, "strategy") for each in program.named.get("Trainer", [])]
    told = " ".join(text_of(made) for each in strategies if each is not None for made in origins(program, each))
    source, function = program.owner[call], function_of(program.owner[call], call)
    below = any(
        program.owner[each] is source and function_of(source, each) is function and each.lineno < call.lineno
        for each in program.named.get("fit", [])
    )
    return below and "ddp" in told and not re.search("spawn|fork|notebook", told)


def _others(program: Program) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """What writes weights in another format than torch.save's."""
    for full, (place, name) in _PLACES.items():
        for call in program.named.get(full.rpartition(".")[2], []):
            if qualified(program, call.func) == full:
                yield call, given(program, call, name, place)
    for call in program.named.get("dump", []):
        pickles = qualified(program, call.func) in ("pickle.dump", "joblib.dump", "dill.dump")
        if pickles and len(call.args) > 1 and _state(program, call.args[0]):
            yield call, call.args[1]


def _exported(program: Program) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """What writes a network for others to read: ONNX, arrays of weights, torch.jit.script(model).save(path)."""
    for call in program.named.get("export", []):
        if qualified(program, call.func) == "torch.onnx.export":
            yield call, given(program, call, "f", 2)
    for full in _ARRAYS:
        for call in program.named.get(full.rpartition(".")[2], []):
            values = [*call.args[1:], *(each.value for each in call.keywords)]
            if qualified(program, call.func) == full and call.args and any(_state(program, each) for each in values):
                yield call, call.args[0]
    for call in program.named.get("save", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if (
            owner is not None
            and call.args
            and not qualified(program, call.func)
            and made_by(program, owner, "script", "trace")
        ):
            yield call, call.args[0]


def _state(program: Program, node: ast.AST) -> bool:
    return depends(program, node, lambda each: isinstance(each, ast.Call) and last_name(each.func) == "state_dict")


def _pretrained(program: Program) -> Iterator[tuple[ast.Call, ast.expr]]:
    """model.save_pretrained(path), where not all ranks have to call it."""
    words = ("fsdp", "fullyshard", "fully_shard", "parallelism", "deepspeed")
    if any(word in one.lower for one in program.sources for word in words):
        return
    for call in program.named.get("save_pretrained", []):
        keys = {each.arg for each in call.keywords}
        of_words = re.search("token|processor", text_of(call.func))
        if call.args and not of_words and not keys & {"is_main_process", None}:
            yield call, call.args[0]
