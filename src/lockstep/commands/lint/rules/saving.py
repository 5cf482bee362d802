"""Rules about checkpoints: who writes, what is in them, what is read back."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, method, sites
from lockstep.commands.lint.dispatch import makings, runs_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.ranks import guarded, on_rank, per_rank
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.roles import (
    comes_by,
    distributed,
    given,
    library,
    lightning,
    optimizers,
    starts_group,
    wrapped,
    wraps,
)
from lockstep.commands.lint.rule import Hit, insert, rule
from lockstep.commands.lint.source import above, class_of, function_of, parameters


def saves(program: Program) -> list[ast.Call]:
    """The calls of torch.save."""
    return [call for call in program.named.get("save", []) if qualified(program, call.func) == "torch.save"]


def in_memory(program: Program, call: ast.Call) -> bool:
    """Whether a torch.save writes into a buffer, not into a file."""
    path = given(program, call, "f", 1)
    made = origins(program, path) if path is not None else []
    return any(isinstance(each, ast.Call) and last_name(each.func) == "BytesIO" for each in made)


def loads(program: Program) -> list[ast.Call]:
    """The calls of torch.load."""
    return [call for call in program.named.get("load", []) if qualified(program, call.func) == "torch.load"]


@rule(
    "LS401",
    "saved-on-every-rank",
    "every rank writes the same file",
    result="N processes write into one file at once: now and then a checkpoint that can't be read",
    why="torch.save runs on each rank, under one name",
    mend="if rank == 0:\n    torch.save(state, path)",
)
def saved_on_every_rank(program: Program) -> Iterator[Hit]:
    """torch.save in what each rank runs, with no rank in its condition or in the file's name."""
    several = any(comes_by(program, each) for each in wrapped(program)) or starts_group(program)
    several = several or bool(program.named.get("Fabric")) or (lightning(program) and distributed(program))
    if not (several or library(program, "horovod", "accelerate", "ignite.distributed")):
        return
    for call, path in _written(program):
        named = path is not None and on_rank(program, path)
        if (
            not named
            and not in_memory(program, call)
            and not guarded(program, call)
            and per_rank(program, call)
            and _reached(program, call)
            and not _of_one_rank(program, call)
            and not _master_saves(program, call)
        ):
            yield Hit(call)


def _written(program: Program) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """The calls that write weights into a file, and its path; in Lightning's modules and callbacks, their hooks'."""
    known = [(call, given(program, call, "f", 1)) for call in saves(program)]
    for name in ("save_file", "save_model", "save", "dump"):
        for call in program.named.get(name, []):
            text = qualified(program, call.func)
            if text in ("safetensors.torch.save_file", "safetensors.torch.save_model", "torch.jit.save"):
                known.append((call, call.args[1] if len(call.args) > 1 else None))
            elif text == "pickle.dump" and len(call.args) > 1 and "state_dict()" in ast.unparse(call.args[0]):
                known.append((call, call.args[1]))
    for call in program.named.get("save_pretrained", []):
        keys = {each.arg for each in call.keywords}
        of_words = re.search("token|processor", ast.unparse(call.func))
        if call.args and not of_words and not keys & {"is_main_process", None}:
            known.append((call, call.args[0]))
    for call, path in known:
        function = function_of(program.owner[call], call)
        if not lightning(program) or (function is not None and function.name.startswith("on_")):
            yield call, path


def _of_one_rank(program: Program, call: ast.Call) -> bool:
    """Whether a call stands in a class that one rank alone makes objects of, or nobody in the program."""
    owner = class_of(program.owner[call], call)
    function = function_of(program.owner[call], call)
    if owner is None or (lightning(program) and function is not None and function.name.startswith("on_")):
        return False
    made = makings(program).get(owner, [])
    return (bool(made) or method(program, owner, "__init__") is not None) and all(
        guarded(program, each) for each in made
    )


def _reached(program: Program, call: ast.Call) -> bool:
    """Whether somebody in the program calls the function that a call stands in, or runs it as a hook on each rank."""
    function = function_of(program.owner[call], call)
    if function is None or sites(program, function) or function.name in ("main", "train", "run"):
        return True
    if lightning(program) and function.name.startswith("on_"):
        return True
    runs = runs_of(program, function)
    return bool(runs) and not all(guarded(program, each) for each in runs)


def _master_saves(program: Program, call: ast.Call) -> bool:
    """Whether the function is a wrapper that asks for the rank by an argument (`is_main`, `should_save`)."""
    for outer in above(program.owner[call], call):
        if isinstance(outer, ast.If) and re.search(
            r"rank|main|master|primary|save_on|chief|zero", ast.unparse(outer.test).lower()
        ):
            return True
    return False


@rule(
    "LS403",
    "module-saved",
    "the wrapper's state is saved, whose keys all begin with `module.`",
    result="the file loads into no plain model: missing keys, or, with strict=False, not one weight and no error",
    why="DDP's state_dict() names its model module",
    mend="torch.save(model.module.state_dict(), path)",
)
def module_saved(program: Program) -> Iterator[Hit]:
    """state_dict() of what DistributedDataParallel returned, within torch.save."""
    if any(
        re.search(r"['\"]module\.['\"]|consume_prefix|removeprefix|clean_state_dict", source.text)
        for source in program.sources
    ):
        return
    back = _loaded_wrapped(program)
    writers = [call for call in program.calls if _writes(program, call)]
    for call in [*saves(program), *writers]:
        whole = call.args[0] if call.args else None
        if isinstance(whole, ast.Name | ast.Attribute) and _surely_wrapped(program, whole):
            yield Hit(call)
        for node in _saved_calls(program, call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if (
                owner is not None
                and last_name(node.func) == "state_dict"
                and _surely_wrapped(program, owner)
                and not back
            ):
                name = owner if isinstance(owner, ast.Name | ast.Attribute) else None
                edits = (insert(name.end_lineno or 0, name.end_col_offset or 0, ".module"),) if name is not None else ()
                yield Hit(node, "", edits if len(_names_in_saves(program, node)) == 1 else ())


def _writes(program: Program, call: ast.Call) -> bool:
    """accelerator.save(state, path), and a local function that hands its first parameter to torch.save."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if last_name(call.func) == "save" and "accelerator" in owner:
        return True
    function = callee(program, call) if call.args else None
    names = [each.arg for each in parameters(function)] if function is not None else []
    inner = [each for each in saves(program) if each.args and function is not None and each in set(ast.walk(function))]
    return any(isinstance(each.args[0], ast.Name) and each.args[0].id in names for each in inner)


def _names_in_saves(program: Program, node: ast.Call) -> list[ast.Call]:
    return [node for call in saves(program) if node in set(ast.walk(call))] or [node]


def _surely_wrapped(program: Program, node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        found = reaching(program, node, bindings(program, node, node.id))
        values = [each.value for each in found]
        calls = [each for each in origins(program, node) if isinstance(each, ast.Call)]
        others = [each in optimizers(program) or last_name(each.func).endswith(("LR", "Loader")) for each in calls]
        model = not any(others)
        if values and model and all(isinstance(each, ast.Call) and _is_prepare(each) for each in values):
            return True
    made = [each for each in origins(program, node) if not isinstance(each, ast.Constant)]
    around = wraps(program, node)
    inner = {each for wrap in around if wrap.args for each in origins(program, wrap.args[0])}
    return bool(around) and set(made) <= {*around, *inner}  # the plain one, where there is one process


def _before_wrapping(program: Program, call: ast.Call, owner: ast.expr) -> bool:
    """Whether the function of a call is started above the line that wraps, in that line's function."""
    function = function_of(program.owner[call], call)
    known = [site.call for site in sites(program, function)] if function is not None else []
    made = wraps(program, owner)
    return bool(known) and all(
        function_of(program.owner[each], each) is function_of(program.owner[one], one) and each.lineno < one.lineno
        for each in known
        for one in made
    )


def _is_prepare(call: ast.Call) -> bool:
    return last_name(call.func) == "prepare" and "accelerator" in ast.unparse(call.func)


def _loaded_wrapped(program: Program) -> bool:
    """Whether the program loads into the wrapper again: then the keys fit, within this program."""
    for call in program.named.get("load_state_dict", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is not None and wraps(program, owner) and not _before_wrapping(program, call, owner):
            return True
        function = function_of(program.owner[call], call)
        if function is not None and function.args.kwarg is not None:  # restore(path, state_dict=model)
            given_by_name = [each.value for site in sites(program, function) for each in site.call.keywords]
            if any(wraps(program, each) for each in given_by_name):
                return True
    return False


def _saved_calls(program: Program, call: ast.Call) -> list[ast.Call]:
    """The calls within what a torch.save writes, through names that hold a dictionary."""
    if not call.args:
        return []
    found, seen, waiting = list[ast.Call](), set[ast.AST](), [call.args[0]]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                found.append(each)
            if isinstance(each, ast.Name) and not qualified(program, each):
                for made in origins(program, each):
                    if isinstance(made, ast.Dict) or (
                        isinstance(made, ast.Call) and last_name(made.func) in ("state_dict", "dict")
                    ):
                        waiting.append(made)
                for binding in program.owner[each].attributes.items():
                    if binding[0].startswith(f"{each.id}["):
                        waiting.extend(b.value for b in binding[1] if isinstance(b.value, ast.expr))
    return found
