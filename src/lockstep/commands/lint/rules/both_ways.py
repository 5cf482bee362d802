"""Whether a program that trains in several processes is written for machines without a GPU as well."""

import ast
import re

from lockstep.commands.lint.around import above
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.roles import given
from lockstep.commands.lint.several import wrapped
from lockstep.commands.lint.tree import text_of, walk

_ASKS = re.compile(r"cuda|gpu|\bcpu\b|device")


def both_ways(program: Program) -> bool:
    """Whether it takes the CPU where there is no GPU, and gives DDP, or set_device, no GPU then."""
    taken = _takes_cpu(program)
    by_option = any(re.search(r"\b(no_?cuda|(use_?)?cpu|no_?gpu)$|\.(no_?cuda|cpu)\b", each) for each in taken)
    return bool(taken) and (by_option or _wraps_both(program) or _sets_both(program))


def _takes_cpu(program: Program) -> list[str]:
    """The conditions of torch.device("cuda", n) if torch.cuda.is_available() else torch.device("cpu"), as texts."""
    found = []
    for source in program.sources:
        for node in source.nodes if "cpu" in source.text else ():
            match node:
                case ast.IfExp(test=test, body=body, orelse=other) if _ASKS.search(text_of(test)):
                    kinds = {_kind(body), _kind(other)}
                case ast.If(test=test, body=[*first], orelse=[*last]) if last and _ASKS.search(text_of(test)):
                    kinds = {_kinds(first), _kinds(last)}
                case _:
                    continue
            found += [text_of(test)] if kinds == {"cpu", "cuda"} else []
    return found


def _kind(node: ast.AST) -> str:
    """The device that an expression names: cuda, cpu, or none of them alone."""
    texts = {each.value for each in walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    named = {text.partition(":")[0] for text in texts} & {"cpu", "cuda"}
    return named.pop() if len(named) == 1 else ""


def _kinds(body: list[ast.stmt]) -> str:
    return next((found for each in body if isinstance(each, ast.Assign) and (found := _kind(each.value))), "")


def _wraps_both(program: Program) -> bool:
    """DDP(model, device_ids=[n] if use_cuda else None)"""
    for call in wrapped(program):
        ids = given(program, call, "device_ids")
        for made in [ids, *origins(program, ids)] if ids is not None else []:
            if isinstance(made, ast.IfExp) and _ASKS.search(text_of(made.test)) and "None" in text_of(made):
                return True
    return False


def _sets_both(program: Program) -> bool:
    """`if torch.cuda.is_available(): torch.cuda.set_device(n)`, and nothing that ends the program otherwise."""
    for call in program.named.get("set_device", []):
        for outer in above(program.owner[call], call):
            if isinstance(outer, ast.If) and _ASKS.search(text_of(outer.test)):
                ends = any(
                    isinstance(each, ast.Raise | ast.Assert | ast.Return)
                    for part in outer.orelse
                    for each in walk(part)
                )
                return not ends
    return False
