"""The rule about the local rank: who tells it."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.source import Binding, Function, Source, parameters
from lockstep.commands.lint.tree import text_of, walk

_TELLS = re.compile(r"LOCAL_RANK|LOCAL_PROCESS|SLURM_LOCALID|LOCALRANKID")
_TOLD = {"get_node_local_rank", "get_local_rank", "local_process_index", "deepspeed"}
_DECLARES = ("add_argument", "option", "add_option", "DEFINE_integer", "DEFINE_string")
_PARSERS = {"HfArgumentParser", "ArgumentParser", "cli", "parse", "add_arguments", "Fire", "run", "CLI", "Typer"}


@rule(
    "LS304",
    "local-rank-argument",
    "the local rank is taken from the command line",
    result="under torchrun each process has the default: all ranks use GPU 0 (or fail on an unknown argument)",
    why="torchrun sets LOCAL_RANK in the environment, and passes no --local_rank",
    mend='local_rank = int(os.environ["LOCAL_RANK"])',
)
def local_rank_argument(program: Program) -> Iterator[Hit]:
    """An option --local_rank, or sys.argv, in a program that never asks the environment for it."""
    if not program.whole or _is_told(program):
        return
    read = any(re.search(r"(?<!def )(\.|\[['\"])local_rank\b", source.text) for source in program.sources)
    for call in [call for name in _DECLARES for call in program.named.get(name, [])]:
        texts = [each for part in call.args for each in origins(program, part)]
        names = [str(each.value) for each in texts if isinstance(each, ast.Constant)]
        asked = {"--local_rank", "--local-rank"} & set(names) or (
            last_name(call.func).startswith("DEFINE") and "local_rank" in names
        )
        if asked and (read or _takes(program, call, names) or any(each.arg == "dest" for each in call.keywords)):
            yield Hit(call)
    if read:
        yield from (Hit(call) for call in _handed_on(program))
    yield from (Hit(node) for node in _declared(program))
    for source in program.sources:
        yield from (Hit(node) for node in _of_argv(source))


def _is_told(program: Program) -> bool:
    """Whether the environment, a library or the program itself says which local rank a process has."""
    for source in program.sources:
        if not (_TELLS.search(source.text) or any(each in source.text for each in ("local", "deepspeed"))):
            continue
        for node in source.of(ast.Constant, ast.Name, ast.Attribute, ast.alias):
            match node:
                case ast.Constant(value=str(text)) if _TELLS.search(text) and not _is_prose(source, node):
                    return True
                case ast.Constant(value=str(text)) if re.fullmatch(r"--local[_-]rank[= ]?", text):
                    parent = source.parents[node]
                    handed = isinstance(parent, ast.Call) and callee(program, parent) is not None
                    if not handed and node not in _names_of_options(program):
                        return True  # the program starts processes with it
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in _TOLD:
                    return True
        for bound in _stored(source):
            known = [each.value for each in bound if not each.path or isinstance(each.value, ast.Call)]
            if any(value is not None and not _same(program, value) for value in known):
                return True
    return False


@remembered
def _names_of_options(program: Program) -> frozenset[ast.AST]:
    """The texts that options are declared by, wherever they stand: `for name in ("--lr", "--local_rank"): ...`."""
    declared = [call for name in _DECLARES for call in program.named.get(name, [])]
    return frozenset(made for call in declared for part in call.args for made in (part, *origins(program, part)))


def _is_prose(source: Source, node: ast.AST) -> bool:
    """Whether a text only tells: a docstring, a help, or the variable's own setting."""
    parent = source.parents[node]
    stored = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)
    return stored or isinstance(parent, ast.Expr) or (isinstance(parent, ast.keyword) and parent.arg == "help")


def _stored(source: Source) -> Iterator[list[Binding]]:
    """What is assigned to an object's local_rank."""
    for text, bound in source.attributes.items():
        if text.endswith((".local_rank", "['local_rank']")) and not text.startswith("self."):
            yield bound


def _same(program: Program, value: ast.AST) -> bool:
    """Whether a value is a constant, or the option itself."""
    return all(
        isinstance(each, ast.Constant) or (not isinstance(each, ast.arg) and "local_rank" in text_of(each))
        for each in origins(program, value)
    )


def _handed_on(program: Program) -> Iterator[ast.Call]:
    """self.add("--local_rank", ...), where the local function hands its arguments to add_argument."""
    declared = [call for name in _DECLARES[:3] for call in program.named.get(name, [])]
    passing = {function_of(program.owner[each], each) for each in declared if any(map(_is_starred, each.args))}
    for call in program.calls if passing - {None} else ():
        names = {each.value for each in call.args if isinstance(each, ast.Constant)}
        if {"--local_rank", "--local-rank"} & names and callee(program, call) in passing:
            yield call


def _is_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def _takes(program: Program, call: ast.Call, names: list[str]) -> bool:
    """Whether an option decorates a function that reads the parameter that the option fills."""
    source = program.owner[call]
    function = source.parents[call]
    own = next((each for each in names if each.isidentifier()), "local_rank")
    return isinstance(function, Function) and call in function.decorator_list and _reads(function, own)


def _reads(function: Function, name: str = "local_rank") -> bool:
    return any(each.arg == name for each in parameters(function)) and any(
        isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load)
        for part in function.body
        for each in walk(part)
    )


def _declared(program: Program) -> Iterator[ast.AST]:
    """A field of a class, or a parameter of a function, that a library reads from the command line."""
    for call in [call for name in sorted(_PARSERS) for call in program.named.get(name, [])]:
        for given in call.args:
            found = definition(program, given)
            if isinstance(found, ast.ClassDef):
                for each in found.body:
                    if isinstance(each, ast.AnnAssign) and last_name(each.target) == "local_rank":
                        yield each
            elif found is not None and last_name(call.func) in ("Fire", "run", "cli", "CLI") and _reads(found):
                yield next(each for each in parameters(found) if each.arg == "local_rank")


def _of_argv(source: Source) -> Iterator[ast.stmt]:
    """local_rank = int(sys.argv[1])"""
    for node in source.of(ast.Assign) if "argv" in source.text else []:
        named = any(last_name(each) == "local_rank" for each in node.targets)
        if named and re.search(r"\bargv\[\d\]", text_of(node.value)):
            yield node
