"""Every error that a user can put right, with its remedy: the literals of the source, names in capitals for values.

`UserError(message, remedy)`, `require(condition, message, remedy)` and `unknown(kind, name, known, remedy)` are found
by their names; a message that is put together elsewhere is followed to its assignment, or to a function of the file.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.from_code import escaped, table

from lockstep.config.conflicts import CONFLICTS

SOURCE = Path(__file__).parents[2] / "src/lockstep"
HEADS = {"en": ["message", "what to do"], "zh": ["报错", "怎么办"]}
TITLES = {  # room -> its heading; the order of the page
    "config": ("Flags and settings", "参数与设置"),
    "data": ("Data", "数据"),
    "models": ("Models", "模型"),
    "processes": ("Processes and machines", "进程与机器"),
    "parallel": ("Sharing a step", "多进程分担一步"),
    "draws": ("Random numbers in forward", "前向传播里的随机数"),
    "training": ("Training and resuming", "训练与续训"),
    "checkpoint": ("Checkpoints and weights", "检查点与权重"),
    "watch": ("Journal, output and hangs", "日志、输出与卡死"),
    "inference": ("New pictures and exported programs", "新图片与导出的程序"),
    "commands": ("Commands", "各个命令"),
    "": ("Everything else", "其他"),
}
RAISES = {"UserError": 0, "Lost": 0, "NonFinite": 1, "require": 1}  # call -> the place of its message
PLACEHOLDER = re.compile(r"[A-Z_]+|\s|\.\.\.")


@dataclass(frozen=True)
class Error:
    """A place that raises one."""

    path: Path
    line: int
    message: str
    remedy: str

    @property
    def room(self) -> str:
        """The folder of its file, which the page groups by."""
        first = self.path.relative_to(SOURCE).parts[0]
        return first if first in TITLES else ""

    @property
    def says_nothing(self) -> bool:
        """True where no word of the message stands in the source: another place of the list has them."""
        return not PLACEHOLDER.sub("", self.message)


Names = dict[str, ast.expr]


@cache
def errors() -> list[Error]:
    """All of them, in the order of the files."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    constants: Names = {}
    for tree in trees.values():
        top = assigned([node for node in tree.body if isinstance(node, ast.Assign)])
        constants |= {name: value for name, value in top.items() if name.isupper()}
        for made in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            constants |= remedies(made)
    found = [error for path, tree in trees.items() for error in of_tree(path, tree, constants)]
    return [*found, *conflicts()]


def conflicts() -> Iterator[Error]:
    """Settings that don't go together: the table of the config."""
    for why, *settings, last in CONFLICTS:
        for other in last.split(" / "):
            named = [(name.replace("_", "-"), value) for name, _, value in map(_parted, (*settings, other))]
            shown = [f"--{name} {value if value.isalnum() else ''}".strip() for name, value in named]
            yield Error(SOURCE / "config/conflicts.py", 0, f"{' with '.join(shown)}: {why}", "Leave one of them out.")


def _parted(setting: str) -> tuple[str, str, str]:
    return setting.partition(" ")


def remedies(made: ast.ClassDef) -> Names:
    """By a class of errors the remedy that it gives all of its own: the second argument of its `super().__init__`."""
    calls = [node for node in ast.walk(made) if isinstance(node, ast.Call) and len(node.args) == 2]
    own = [call.args[1] for call in calls if ast.unparse(call.func) == "super().__init__"]
    return {made.name: own[0]} if own and made.name in RAISES else {}


def assigned(body: list[ast.stmt]) -> Names:
    """The names that statements give a value, the last one each."""
    return {
        target.id: node.value
        for each in body
        for node in ast.walk(each)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def returned(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function that makes a message returns, the words alone; empty where it makes none."""
    found = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    return [node for node in found[:1] if isinstance(node, ast.JoinedStr | ast.Constant)]


def of_tree(path: Path, tree: ast.Module, constants: Names) -> Iterator[Error]:
    """The errors of one file."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    constants = constants | {function.name: node for function in functions for node in returned(function)}
    local: dict[ast.AST, Names] = {}
    for function in functions:  # an inner function after the one around it
        names = local.get(function, {}) | assigned(function.body)
        local |= dict.fromkeys(ast.walk(function), names)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        names = constants | local.get(node, {})
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in RAISES and len(arguments) > RAISES[name]:
            message, *remedy = arguments[RAISES[name] :]
            said = text_of(remedy[0], names) if remedy else text_of(names[name], names) if name in names else ""
            told = said if PLACEHOLDER.sub("", said) else ""  # one that is put together where it is raised
            yield Error(path, node.lineno, text_of(message, names), told)
        elif name == "unknown" and len(arguments) > 2:
            kind, what, _, *remedy = arguments
            said = text_of(remedy[0], names) if remedy else ""
            message_text = f"unknown {text_of(kind, names)} {value_of(what)}"
            yield Error(path, node.lineno, message_text, f"Did you mean ...? {said}".strip())


def text_of(node: ast.expr, names: Names, depth: int = 0) -> str:
    """What an expression says, as far as its words stand in the source."""
    again = depth + 1
    if depth > 4:
        return "..."
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, names, again) for part in parts)
        case ast.FormattedValue(value=value):
            inner = names.get(value.id) if isinstance(value, ast.Name) else value
            literal = isinstance(inner, ast.JoinedStr | ast.Constant | ast.IfExp)
            return text_of(inner, names, again) if literal and inner is not None else value_of(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, names, again) + text_of(right, names, again)
        case ast.IfExp(body=body, orelse=orelse):
            both = [text_of(part, names, again) for part in (body, orelse)]
            return " / ".join(part for part in both if part)
        case ast.Name(id=name) if name in names:
            return text_of(names[name], names, again)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=[first, *_])]):
            return f"{text_of(first, names, again)} ..."
        case ast.Call(func=ast.Name(id=name)) if name in names and name != "len":
            return text_of(names[name], names, again)
        case ast.Call(func=ast.Attribute(value=inner, attr="strip" | "replace")):
            return text_of(inner, names, again)
    return value_of(node)


def value_of(node: ast.expr) -> str:
    """A word in capitals for a value that is known when the program runs: the name that the source has for it."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").upper()
        case ast.Call(func=ast.Name(id="len")):
            return "N"
        case ast.Call(args=[first, *_]):
            return value_of(first)
        case ast.Call(func=function):
            return value_of(function)
        case ast.Subscript(value=value):
            return value_of(value)
        case ast.Constant(value=value):
            return str(value)
    return "..."


def page(language: str = "en") -> str:
    """A section for each room of the source."""
    found = [error for error in errors() if not error.says_nothing]
    parts = []
    for room, titles in TITLES.items():
        of_room = dict.fromkeys((error.message, error.remedy) for error in found if error.room == room)
        if of_room:
            rows = [[escaped(message), escaped(remedy)] for message, remedy in of_room]
            parts.append(f"## {titles[language == 'zh']}\n\n{table(HEADS[language], rows)}\n")
    return "".join(parts)
