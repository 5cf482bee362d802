"""The rule about where processes meet: ports, addresses, files."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Edit, Hit, replace, rule
from lockstep.commands.lint.source import above


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
    for source in program.sources:
        for text, bindings in source.attributes.items():
            if text in ("os.environ['MASTER_PORT']", "environ['MASTER_PORT']"):
                for binding in bindings:
                    port = binding.value
                    if isinstance(port, ast.expr) and _fixed(program, port) and not _asked(program, binding.node):
                        yield Hit(binding.node, "MASTER_PORT", _setdefault(binding.node, port))
    for call in program.named.get("update", []):
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        given_port = given(program, call, "MASTER_PORT")
        if given_port is None and call.args and isinstance(call.args[0], ast.Dict):
            entries = zip(call.args[0].keys, call.args[0].values, strict=True)
            given_port = next((v for k, v in entries if isinstance(k, ast.Constant) and k.value == "MASTER_PORT"), None)
        if owner.endswith("environ") and given_port is not None and _fixed(program, given_port):
            yield Hit(call, "MASTER_PORT")
    for call in program.calls:  # idist.Parallel(master_port=2222)
        chosen = constant(program, given(program, call, "master_port"))
        if isinstance(chosen, int) and chosen > 0:
            yield Hit(call, f"master_port={chosen}")
    for call in program.named.get("FileStore", []):
        place = constant(program, given(program, call, "file_name", 0))
        if isinstance(place, str) and place.startswith("/"):
            yield Hit(call, place)
    for call in program.named.get("TCPStore", []):
        number = constant(program, given(program, call, "port", 1))
        if isinstance(number, int) and number > 0:
            yield Hit(call, f"port {number}")
    started = [
        call for name in ("init_process_group", "Parallel", "initialize") for call in program.named.get(name, [])
    ]
    for call in started:
        method = given(program, call, "init_method", 1)
        place = constant(program, method)
        ends = method.values[-1] if isinstance(method, ast.JoinedStr) and method.values else None
        if isinstance(ends, ast.Constant) and re.search(r":[1-9]\d*$", str(ends.value)):
            yield Hit(call, f"port {str(ends.value).rpartition(':')[2]}")
        if isinstance(place, str) and method is not None and re.match(r"tcp://.*:[1-9]\d*$|file://", place):
            yield Hit(method, place)


def _common_file(program: Program) -> Iterator[Hit]:
    """torch.save of a name in the text to the folder for temporary files, which all runs of a machine share."""
    for call in program.named.get("save", []) if program.named.get("init_process_group") else []:
        path = given(program, call, "f", 1) if qualified(program, call.func) == "torch.save" else None
        for made in origins(program, path) if path is not None else []:
            text = ast.unparse(made)
            named = any(on_rank(program, each) for each in ast.walk(made) if isinstance(each, ast.Name))
            unique = re.search(r"getpid|uuid|mkdtemp|mkstemp|TemporaryDirectory|time\(|JOB_ID", text)
            joined = isinstance(made, ast.BinOp) or (isinstance(made, ast.Call) and last_name(made.func) == "join")
            common = (joined and "gettempdir()" in text) or (
                isinstance(made, ast.Constant) and text.startswith("'/tmp/")
            )
            if common and not named and not unique and not isinstance(made, ast.JoinedStr):
                yield Hit(made, "a name that all runs share")


def _fixed(program: Program, value: ast.expr) -> bool:
    """Whether a port is a number in the text, and no option's default."""
    found = constant(program, value)
    if isinstance(value, ast.Call) and last_name(value.func) == "str" and value.args:
        found = constant(program, value.args[0])
    return isinstance(found, str | int) and str(found) not in ("0", "") and not isinstance(found, bool)


def _asked(program: Program, node: ast.AST) -> bool:
    """Whether the line runs only where nothing has been set."""
    return any(
        isinstance(each, ast.If) and re.search(r"environ|MASTER|RANK|getenv", ast.unparse(each.test))
        for each in above(program.owner[node], node)
    )


def _setdefault(node: ast.AST, value: ast.expr) -> tuple[Edit, ...]:
    """`os.environ["X"] = y` -> `os.environ.setdefault("X", y)`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        return (replace(node, f'{ast.unparse(target.value)}.setdefault("MASTER_PORT", {ast.unparse(value)})'),)
    return ()
