"""The rule about where processes meet: ports, addresses, files."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Edit, Hit, replace, rule
from lockstep.commands.lint.rules.settings import UNKNOWN, settings, written
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS305",
    "fixed-port",
    "the port, the address or the meeting file is fixed",
    result="a second run on the same machine fails with address already in use, or meets the first one's processes; no "
    "second machine finds the first",
    why="the text gives each run the same meeting place, whatever the launcher says",
    mend='dist.init_process_group("nccl")  # under torchrun, which chooses\n'
    'os.environ.setdefault("MASTER_PORT", "29500")  # or: for one who has not chosen',
)
def fixed_port(program: Program) -> Iterator[Hit]:
    """MASTER_PORT set to a constant, an init_method with a constant port or file, under no question."""
    yield from _common_file(program)
    for node, name, chosen in settings(program):
        if name == "MASTER_PORT" and _fixed(program, chosen) and not _asked(program, node):
            yield Hit(node, name, _setdefault(node, chosen))
        elif name == "MASTER_ADDR" and _machine(program, chosen) and not _asked(program, node):
            yield Hit(node, name)
    yield from _of_numbers(program)
    yield from _of_commands(program)
    for name, argument, place in (("FileStore", "file_name", 0), ("LaunchConfig", "rdzv_endpoint", -1)):
        for call in program.named.get(name, []):
            value = given(program, call, argument, place)
            text = written(program, value) if value is not None else UNKNOWN
            if re.search(r":[1-9]\d*$", text) or (name == "FileStore" and re.match(r"/", text) and UNKNOWN not in text):
                yield Hit(call, text.replace(UNKNOWN, "..."))
    started = [
        call for name in ("init_process_group", "Parallel", "initialize") for call in program.named.get(name, [])
    ]
    for call in started:
        method = given(program, call, "init_method", 1)
        text = written(program, method) if method is not None else ""
        if method is not None and re.match(r"file://", text) and UNKNOWN not in text:
            yield Hit(method, text)
        elif method is not None and re.match(r"tcp://.*:[1-9]\d*$", text):
            yield Hit(method, text) if UNKNOWN not in text else Hit(call, f"port {text.rpartition(':')[2]}")


def _of_numbers(program: Program) -> Iterator[Hit]:
    """idist.Parallel(master_port=2222), TCPStore(host, 2222)."""
    for call in program.calls:
        chosen = constant(program, given(program, call, "master_port"))
        if isinstance(chosen, int) and chosen > 0:
            yield Hit(call, f"master_port={chosen}")
    for call in program.named.get("TCPStore", []):
        number = constant(program, given(program, call, "port", 1))
        if isinstance(number, int) and number > 0:
            yield Hit(call, f"port {number}")


def _of_commands(program: Program) -> Iterator[Hit]:
    """torchrun --master_port 29511, as a list of words or as one text that a process is started with."""
    for source in program.sources:
        for node in source.of(ast.List, ast.Tuple, ast.Call) if re.search("master[_-]port", source.text) else []:
            parts = node.elts if isinstance(node, ast.List | ast.Tuple) else getattr(node, "args", [])
            words = [each.value if isinstance(each, ast.Constant) else UNKNOWN for each in parts]
            text = " ".join(map(str, words))
            owner = text_of(node.func) if isinstance(node, ast.Call) else "os.system"
            runs = re.match(r"(os\.(system|popen)|subprocess\.)", owner) is not None
            starts = "torchrun" in text or "torch.distributed." in text or "launch" in text
            if starts and runs and re.search(r"--(master|main_process)[_-]port[= ][1-9]\d*", text):
                yield Hit(node, "the launcher's port")


def _machine(program: Program, value: ast.expr) -> bool:
    """Whether an address is one machine's, by its number or its name."""
    found = constant(program, value)
    return isinstance(found, str) and bool(re.fullmatch(r"(?!127\.|0\.0\.0\.0|localhost|::)[\w.:-]*[\w]", found))


def _common_file(program: Program) -> Iterator[Hit]:
    """torch.save of a name in the text to the folder for temporary files, which all runs of a machine share."""
    for path in _saved(program) if program.named.get("init_process_group") else []:
        for made in origins(program, path):
            text = text_of(made)
            named = any(on_rank(program, each) for each in walk(made) if isinstance(each, ast.Name))
            unique = re.search(r"getpid|uuid|mkdtemp|mkstemp|TemporaryDirectory|time\(|JOB_ID", text)
            joined = isinstance(made, ast.BinOp) or (isinstance(made, ast.Call) and last_name(made.func) == "join")
            common = (joined and "gettempdir()" in text) or (
                isinstance(made, ast.Constant) and text.startswith("'/tmp/")
            )
            if common and not named and not unique and not isinstance(made, ast.JoinedStr):
                yield Hit(made, "a name that all runs share")


def _saved(program: Program) -> Iterator[ast.expr]:
    """torch.save(x, path), np.save(path, x)."""
    for name, place, meant in (("save", 1, "torch.save"), ("save", 0, "numpy.save"), ("savez", 0, "numpy.savez")):
        for call in program.named.get(name, []):
            path = given(program, call, "f" if place else "file", place)
            if path is not None and qualified(program, call.func) == meant:
                yield path


def _fixed(program: Program, value: ast.expr) -> bool:
    """Whether a port is a number in the text, and no option's default."""
    found = constant(program, value)
    if isinstance(value, ast.Call) and last_name(value.func) == "str" and value.args:
        found = constant(program, value.args[0])
    if isinstance(value, ast.JoinedStr):
        text = written(program, value)
        found = text if text.isdigit() else ...
    return isinstance(found, str | int) and str(found) not in ("0", "") and not isinstance(found, bool)


def _asked(program: Program, node: ast.AST) -> bool:
    """Whether the line runs only where nothing has been set."""
    return any(
        isinstance(each, ast.If) and re.search(r"environ|MASTER|RANK|getenv", text_of(each.test))
        for each in above(program.owner[node], node)
    )


def _setdefault(node: ast.AST, value: ast.expr) -> tuple[Edit, ...]:
    """`os.environ["X"] = y` -> `os.environ.setdefault("X", y)`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        return (replace(node, f'{text_of(target.value)}.setdefault("MASTER_PORT", {text_of(value)})'),)
    return ()
