"""Rules about batch size, learning rate and schedule: which experiment N processes run."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.learning import (
    counts_ranks,
    factors,
    made_of,
    peaks,
    rates,
    set_later,
)
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.ranks import is_world, on_world
from lockstep.commands.lint.roles import constant, given, loaders, of_loader, samplers, sharding, training_loaders
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.rules.per_process import called, meant_for_all
from lockstep.commands.lint.several import distributed, lightning
from lockstep.commands.lint.tree import text_of, walk

_EACH = re.compile(
    r"per[ _-]?(gpu|device|process|proc|rank|worker|node|core)|(each|every|a) (gpu|device|process|rank)|micro|local"
    r"|each|_rank|每(张|个|块)|单卡"
)
_ONE = re.compile(
    r"(of|for|on|per) (one |a single |1 |each )?(gpu|device|process|rank|worker)|for (a )?batch(es)?( size)?( of)? \d+"
)


@rule(
    "LS208",
    "not-adjusted-to-n",
    "neither batch size nor learning rate knows the number of processes",
    result="N processes train another experiment: on 4 processes 4 times the batch, a quarter of the steps, at the "
    "same rate",
    why="a loader's batch size is its own process's, so the global batch is N times that",
    mend="DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)  # the same experiment\n"
    "SGD(model.parameters(), lr=lr * world_size)  # or another one, on purpose",
)
def not_adjusted(program: Program) -> Iterator[Hit]:
    """Shared-out training whose batch, rate and names never mention N or a process."""
    known = rates(program)
    if not known or not (distributed(program) or managed(program)) or _rate_knows(program):
        return
    for loader in loaders(program) if lightning(program) else training_loaders(program):
        batch = batch_of(program, loader)
        if lightning(program) and batch is not None and re.search(r"test|val", text_of(batch).lower()):
            continue
        cut = lightning(program) or sharding(program, loader) or prepared(program, loader)
        if batch is None or not cut or on_world(program, batch) or last_name(loader.func) == "auto_dataloader":
            continue
        alone = next((rate for rate in [*peaks(program), *known] if _of_one_process(program, rate)), None)
        if alone is not None and not meant_for_all(program, batch) and not split_batches(program):
            yield Hit(written(program, alone), f"lr={text_of(alone)}, said to be one process's")
            if lightning(program):
                return
            continue
        if (
            sharding(program, loader)
            and not lightning(program)
            and not (_for_each(program, batch) or _line_says(program, batch) or meant_for_all(program, batch))
        ):
            yield Hit(batch, f"batch_size={text_of(batch)}")


def written(program: Program, rate: ast.expr) -> ast.AST:
    """Where a rate was computed: the value that its name was given."""
    found = bindings(program, rate, rate.id) if isinstance(rate, ast.Name) else []
    value = found[0].value if len(found) == 1 and found[0].kind == "value" and not found[0].path else None
    return value or rate


def batch_of(program: Program, loader: ast.Call) -> ast.expr | None:
    """A loader's batch size, its own or its batch sampler's."""
    batch = of_loader(program, loader, "batch_size")
    if batch is None:
        made = [each for each in samplers(program, loader) if last_name(each.func) == "BatchSampler"]
        batch = given(program, made[0], "batch_size", 1) if made else None
    return batch


def _rate_knows(program: Program) -> bool:
    """Whether the number of processes enters a rate: at once, by a schedule's peak or factor, or set later."""
    later = [each.value for each in set_later(program) if each.value is not None]
    if any(counts_ranks(program, each) for each in [*rates(program), *peaks(program), *factors(program), *later]):
        return True
    for call in program.calls:
        if re.search(r"WarmUp|warmup", last_name(call.func)) and any(
            is_world(each) for part in call.args for each in walk(part)
        ):
            return True
    return any(
        binding.value is not None and on_world(program, binding.value)
        for source in program.sources
        for text, found in source.attributes.items()
        if text.endswith((".lr", ".learning_rate"))
        for binding in found
    )


def split_batches(program: Program) -> bool:
    """Accelerator(split_batches=True): a loader's batch is that of all processes."""
    return any(
        constant(program, keyword.value) is True
        for call in program.calls
        for keyword in call.keywords
        if keyword.arg == "split_batches"
    )


def _of_one_process(program: Program, rate: ast.expr) -> bool:
    """Whether a rate, or the batch that it is made of, is called that of one process, or of a batch that is named.

    By its name, its option's help, or a comment beside it.
    """
    parts = made_of(program, rate)
    named = [each for each in parts if isinstance(each, ast.Name | ast.Attribute)]
    constants = [one for each in named for one in origins(program, each) if isinstance(one, ast.Constant)]
    names = {last_name(each) for each in named}
    words = [option(program, name)[0] for name in names] + [each.replace("_", " ") for each in names]
    lines = {(program.owner[each], each.lineno) for each in [*parts, *constants] if isinstance(each, ast.expr)}
    words += [source.lines[line - 1].partition("#")[2] for source, line in lines]
    return any(_ONE.search(each.lower()) for each in words)


def _for_each(program: Program, node: ast.expr) -> bool:
    """Whether a batch size is called one process's, by a name or an option's help."""

    def says(each: ast.AST) -> bool:
        name = called(each) if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) else ""
        return bool(name) and bool(_EACH.search(name) or _EACH.search(option(program, name)[0].lower()))

    return depends(program, node, says)


def _line_says(program: Program, node: ast.expr) -> bool:
    """Whether a comment beside it, or where its name is bound, says that it is one process's."""
    source = program.owner[node]
    lines = {
        node.lineno,
        *(
            each.lineno
            for each in origins(program, node)
            if isinstance(each, ast.expr) and program.owner[each] is source
        ),
    }
    for each in walk(node):
        if isinstance(each, ast.Name):
            for binding in source.names.get(source.tree, {}).get(each.id, []):
                lines.add(getattr(binding.node, "lineno", node.lineno))
    return any(
        "#" in source.lines[n - 1] and _EACH.search(source.lines[n - 1].partition("#")[2].lower())
        for line in lines
        for n in (line, line - 1)
        if n >= 1 and (n == line or source.lines[n - 1].strip().startswith("#"))
    )
