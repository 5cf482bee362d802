"""LS3: ranks, devices, collectives, and how the processes start and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator

from lockstep_lint.facts.modules import FUNCTIONS, LOOPS, Scope
from lockstep_lint.facts.program import calls_below
from lockstep_lint.facts.ranks import alone, guard, optional
from lockstep_lint.facts.training import COLLECTIVES, DDP, FSDP, Facts, Loop, StepLoop, for_evaluation
from lockstep_lint.facts.tree import last_name, place, receiver, walk_calls, within, words
from lockstep_lint.rules import Places, rule
from lockstep_lint.rules.maths import accumulations, updates

AVERAGES = (  # a call that shows that gradients may be averaged by other means than DDP
    r"reduce|gather|broadcast|rpc|pipe|send|recv|[Pp]arallel|DTensor|distribute_|shard|fairscale|deepspeed|apex|ZeRO|sync"
)
BY_ALL = re.compile("^(load|resume|restore|train|fit|forward)")  # methods that all ranks call
BUFFERS = (  # a call that shows that a model has batch norm
    r"BatchNorm|convert_sync|^(wide_)?res(net|next)\w*\d|^(densenet|mobilenet|efficientnet|regnet|shufflenet|inception)_?\w*\d|_bn$"
)


@rule("LS302", "wrapper-not-called")
def wrapper_not_called(facts: Facts) -> Places:
    """The training step calls the model without its wrapper.

    Gradients are never averaged: each rank trains a model of its own on its own shard, and the saved one is that of one
    rank.

    DDP prepares the reduction in the wrapper's own forward(): model.module(x) goes past it.

    Wrong:
        loss = loss_function(model.module(x), y)  # model is a DistributedDataParallel
        loss.backward()
    Right:
        loss = loss_function(model(x), y)
        loss.backward()
    """
    reduced = {word for call, _ in facts.calls("all_reduce", "allreduce") for word in words(*call.args)}
    if not facts.by_hand or not facts.wraps or any("grad" in word for word in reduced):
        return
    for loop in facts.step_loops:
        calls = [*calls_below(loop.node, loop.scope)]
        if loop.backward_scope is not loop.scope:
            calls += [(call, loop.backward_scope) for call in loop.backward_scope.calls]
        wrapped = [(c, s) for c, s in calls if facts.is_wrapped(c.func, s) and not facts.resolve(c.func, s)]
        if any(not _inside_wrapper(facts, call.func, scope) for call, scope in wrapped):
            continue
        for call, scope in calls:
            inner = call.func
            if isinstance(inner, ast.Attribute) and re.search("^forward|loss", inner.attr):
                inner = inner.value  # model.module.forward(x)
            if not facts.under_no_grad(call, scope) and _inside_wrapper(facts, inner, scope):
                yield call, scope, ""
                break


def _inside_wrapper(facts: Facts, model: ast.expr, scope: Scope) -> bool:
    """Whether an expression is the module inside a DDP."""
    return any(
        isinstance(value.expr, ast.Attribute)
        and value.expr.attr == "module"
        and facts.is_wrapped(value.expr.value, value.scope)
        for value in facts.sources(model, scope)
    )


@rule("LS308", "collective-on-some-ranks")
def collective_on_some_ranks(facts: Facts) -> Places:
    """Only some ranks reach a collective.

    They wait for the others until the timeout, and the run fails; or the call is paired with another one, and gives
    wrong numbers.

    A collective ends when all ranks of the group have called it. The backward pass of DDP is one: where a rank leaves
    the loop or skips a step alone, the others wait for it. Its forward pass is one too where the model has buffers, as
    of batch norm: they are broadcast. One rank can evaluate model.module instead.

    Wrong:
        if rank == 0:
            dist.all_reduce(loss)
            print(loss)
    Right:
        dist.all_reduce(loss)
        if rank == 0:
            print(loss)
    """
    if not facts.several:
        return
    within_function = _with_collectives(facts)
    places = [(call, scope, frozenset([last_name(call)]), "") for call, scope in _collectives(facts)]
    for target, names in within_function.items():
        said = f"{target.name} calls {', '.join(sorted(names))}"
        places += [(site.call, site.scope, names, said) for site in facts.sites.get(target, []) if not site.spawned]
    for call, scope, names, said in places:
        answer = guard(facts, call, scope, 0)
        if answer is None or alone(facts, call, scope) or not facts.per_rank(scope):
            continue
        if not _met(facts, call, scope, names, answer, within_function):
            yield call, scope, said
    if facts.wraps and facts.by_hand:
        yield from _left_alone(facts)
        yield from _called_alone(facts, within_function)


def _collectives(facts: Facts) -> Iterator[tuple[ast.Call, Scope]]:
    return ((call, scope) for call, scope in facts.calls(*COLLECTIVES) if facts.collective(call, scope))


def _with_collectives(facts: Facts) -> dict[Scope, frozenset[str]]:
    """The functions that call a collective on all ranks, by themselves or one call deeper."""
    found: dict[Scope, frozenset[str]] = {}

    def enter(call: ast.Call, scope: Scope, names: frozenset[str]) -> None:
        if scope.is_function and guard(facts, call, scope, 0) is None and not _optional(facts, call, scope):
            found[scope] = found.get(scope, frozenset()) | names

    for call, scope in _collectives(facts):
        enter(call, scope, frozenset([last_name(call)]))
    for target, names in list(found.items()):
        for site in facts.sites.get(target, []):
            if not site.spawned and site.scope in facts.reached:
                enter(site.call, site.scope, names)
    return found


def _optional(facts: Facts, call: ast.Call, scope: Scope) -> bool:
    """Whether a test decides by something else than the number of processes."""
    by_number = re.compile(r"dist|world|initialized|rank|size|parallel|gpu", re.I)
    return any(not by_number.search(" ".join(words(each.test))) for each in facts.conditions(call, scope))


def _met(
    facts: Facts,
    call: ast.Call,
    scope: Scope,
    names: frozenset[str],
    answer: bool,
    within_function: dict[Scope, frozenset[str]],
) -> bool:
    """Whether the other ranks call the same on their own path."""
    for other in scope.calls:
        target = facts.resolve(other.func, scope)
        theirs = {last_name(other)} | (within_function.get(target, frozenset()) if target else frozenset())
        if other is not call and theirs & names and guard(facts, other, scope, 0) is (not answer):
            return True
    return False


def _left_alone(facts: Facts) -> Places:
    """Exits from a training loop, and skipped steps, that one rank takes by itself."""
    for loop in facts.step_loops:
        for around, scope in [(loop.node, loop.scope), *facts.epoch_loops(loop)]:
            if alone(facts, around, scope) or guard(facts, around, scope, 0) is not None:
                continue
            for node in _exits(around):
                if guard(facts, node, scope, 0) is not None and not alone(facts, node, scope):
                    yield node, scope, "one rank leaves the loop alone"
        for node in ast.walk(loop.node):
            if not isinstance(node, ast.If) or not isinstance(node.body[-1], (ast.Continue, ast.Break)):
                continue
            by_loss = any(last_name(call) in ("isnan", "isinf", "isfinite") for call in walk_calls(node.test))
            around = next(p for _, p in loop.scope.module.ancestors(node) if isinstance(p, LOOPS))
            if by_loss and around is loop.node and node.lineno < loop.backward.lineno:
                yield node, loop.scope, "one rank skips the step alone, because of its own loss"


def _called_alone(facts: Facts, reported: Container[Scope]) -> Places:
    """Calls of a wrapped model with batch norm that one rank makes, by itself or in a function that it calls."""
    if not facts.named(BUFFERS):
        return
    for scope in facts.reached:
        for call in scope.calls if scope.tests and facts.per_rank(scope) else ():
            answer = None if last_name(call) in COLLECTIVES else guard(facts, call, scope, 0)
            if answer is None or alone(facts, call, scope):
                continue
            target = facts.resolve(call.func, scope)
            if target is None and facts.is_wrapped(call.func, scope):
                yield call, scope, f"{ast.unparse(call.func)} is in DDP, and its forward pass broadcasts the buffers"
            elif target and target not in reported and (model := _model_called(facts, call, scope, target)):
                yield call, scope, f"{target.name} calls {model}, which is in DDP and broadcasts its buffers"


def _model_called(facts: Facts, call: ast.Call, scope: Scope, target: Scope) -> str:
    """The wrapped model that a function calls, as a parameter or as an attribute; empty where there is none."""
    site = next((each for each in facts.sites.get(target, []) if each.call is call), None)
    for inner in target.calls if site and not target.name.startswith(("save", "log")) else ():
        match inner.func:
            case ast.Name(id=name) if site and name in target.params and name not in target.bindings:
                wrapped = facts.is_wrapped(site.argument(target, name), scope)
            case ast.Attribute(value=ast.Name(id="self")) if not facts.resolve(inner.func, target):
                wrapped = facts.is_wrapped(inner.func, target)
            case _:
                continue
        if wrapped and not alone(facts, inner, target):
            return ast.unparse(inner.func)
    return ""


def _exits(loop: Loop) -> Iterator[ast.AST]:
    """The breaks and returns of a loop, without those of loops and functions in it."""
    stack: list[ast.AST] = list(loop.body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Break, ast.Return)):
            yield node
        elif not isinstance(node, (*LOOPS, *FUNCTIONS)):
            stack.extend(ast.iter_child_nodes(node))


@rule("LS309", "barrier-each-step")
def barrier_each_step(facts: Facts) -> Places:
    """A barrier in each step.

    Each step waits for the slowest rank twice, and for the GPU: the training loses some percent to half of its speed,
    and is no safer.

    In DDP's all-reduce of the gradients the ranks wait for each other already.

    Wrong:
        loss.backward()
        dist.barrier()
        optimizer.step()
    Right:
        loss.backward()
        optimizer.step()
    """
    for loop in facts.step_loops:
        outer = facts.epoch_loops(loop) if any(_passes(facts, loop)) else []  # the inner loop only accumulates
        for around, scope in [(loop.node, loop.scope), *outer]:
            calls = [call for call in walk_calls(around) if last_name(call) in ("barrier", "wait_for_everyone")]
            waits = [c for c in calls if facts.always_in(c, around, scope) and facts.collective(c, scope)]
            if waits:
                yield waits[0], scope, f"{len(waits)} of them" if len(waits) > 1 else ""
                break


@rule("LS322", "evaluation-each-step")
def evaluation_each_step(facts: Facts) -> Places:
    """The test set is evaluated after each training step.

    Each step takes as long as a pass over the whole test set, so nearly all of the time goes into evaluation.

    Wrong:
        for images, labels in train_loader:
            step(model, images, labels)
            evaluate(model, test_loader)
    Right:
        for images, labels in train_loader:
            step(model, images, labels)
        evaluate(model, test_loader)
    """
    passes = {scope for loop, scope in facts.evaluation_loops if for_evaluation(scope.name) and _over_data(loop)}
    for loop in facts.step_loops:
        skips = any(isinstance(node, ast.Continue) for node in ast.walk(loop.node))
        for call in walk_calls(loop.node) if _over_data(loop.node) and not skips else ():
            if facts.resolve(call.func, loop.scope) in passes and facts.always_in(call, loop.node, loop.scope):
                yield call, loop.scope, ""


def _over_data(loop: Loop) -> bool:
    """Whether a loop goes over batches, by its names."""
    return any(re.search("load|data|iter|set$", word, re.I) for word in words(getattr(loop, "iter", None)))


@rule("LS311", "no-no-sync")
def no_no_sync(facts: Facts) -> Places:
    """Gradients are all-reduced for each accumulated batch.

    The same gradients need k times the communication: on a slow network the training takes up to k times as long.

    DDP reduces in every backward() outside no_sync(), which has to cover the forward pass too. With Accelerate it is
    accelerator.accumulate(model).

    Wrong:
        for i, (x, y) in enumerate(loader):
            (loss_function(model(x), y) / k).backward()
    Right:
        for i, (x, y) in enumerate(loader):
            with nullcontext() if (i + 1) % k == 0 else model.no_sync():
                (loss_function(model(x), y) / k).backward()
    """
    reduces = facts.kinds == {"accelerate"} or (facts.wraps and facts.by_hand)
    if not reduces or facts.sharded_model or facts.says(r"no_sync|require_\w*grad_sync|\.accumulate\([^)]"):
        return
    found = [(each.loop, each.every) for each in accumulations(facts)]
    found += [(loop, every) for loop in facts.step_loops for every in _passes(facts, loop)]
    for loop, every in found:
        known = facts.constants(every, loop.scope)
        if facts.whole or not known or not known <= {0, 1, None}:  # a library's default is for others to change
            yield loop.backward, loop.backward_scope, f"every {ast.unparse(every)} batches"


def _passes(facts: Facts, loop: StepLoop) -> Iterator[ast.expr]:
    """How often an inner loop adds gradients up before the loop around it updates the weights."""
    match loop.node:
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[ast.Name() | ast.Attribute() as count])):
            for around, scope in facts.epoch_loops(loop):
                steps = [call for call in walk_calls(around) if updates(call)]
                inside = any(within(call, loop.node) for call in steps)
                if not inside and any(facts.always_in(call, around, scope) for call in steps):
                    yield count


@rule("LS319", "gradients-not-averaged")
def gradients_not_averaged(facts: Facts) -> Places:
    """The model is never wrapped, and nothing averages the gradients.

    N processes train N models, each on its own shard, and the saved model is that of one rank.

    Wrong:
        dist.init_process_group("nccl")
        train(model, loader)
    Right:
        dist.init_process_group("nccl")
        train(DistributedDataParallel(model), loader)
    """
    if facts.kinds != {"torch"} or not facts.step_loops or facts.named(AVERAGES) or any(facts.calls(*DDP, *FSDP)):
        return
    for call, scope in facts.calls("init_process_group"):
        if not for_evaluation(scope.module.path.stem) and not optional(facts, call, scope):
            yield call, scope, ""


@rule("LS321", "missing-on-other-ranks")
def missing_on_other_ranks(facts: Facts) -> Places:
    """All ranks use what only one of them has made.

    The other ranks end with a NameError, or with an AttributeError of None, and the run with them.

    Wrong:
        if rank == 0:
            writer = SummaryWriter()
        writer.add_scalar("loss", loss)
    Right:
        if rank == 0:
            writer = SummaryWriter()
            writer.add_scalar("loss", loss)
    """
    for scope in facts.reached if facts.several else ():
        if scope.is_function and scope.tests and facts.per_rank(scope):
            yield from _unbound(facts, scope)
        elif scope.is_class:
            yield from _none(facts, scope)


def _unbound(facts: Facts, scope: Scope) -> Places:
    """Uses of a local variable that one rank alone has bound."""
    for name, bindings in scope.bindings.items():
        if name in scope.params or name in scope.inner or name in scope.module.imports:
            continue
        answers = {guard(facts, each.node, scope, 0) for each in bindings}
        if answers != {True} or any(alone(facts, each.node, scope) for each in bindings):
            continue
        for node in ast.walk(scope.node):
            use = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            later = use and place(node) > place(bindings[0].node)
            if later and guard(facts, node, scope, 0) is None and _on_all_ranks(facts, node, scope):
                yield node, scope, name
                break


def _none(facts: Facts, kind: Scope) -> Places:
    """Calls of methods of an attribute that one rank has made, and that is None or missing on the others."""
    for name, bindings in kind.attributes.items():
        made = [each for each in bindings if isinstance(each.value, ast.Call)]
        rest = [each for each in bindings if each not in made]
        empty = all(isinstance(each.value, ast.Constant) and each.value.value is None for each in rest)
        if not made or not empty or any(guard(facts, each.node, each.scope, 0) is not True for each in made):
            continue
        bases = kind.node.bases if isinstance(kind.node, ast.ClassDef) else []
        outside = [base for base in bases if last_name(base) not in ("object", "Module")]
        if not rest and (outside or any(each.scope.name != "__init__" for each in made)):
            continue  # it may be set elsewhere
        for method in (scope for scope in kind.inner.values() if scope in facts.reached and facts.per_rank(scope)):
            for call in method.calls:
                owner = receiver(call)
                used = isinstance(owner, ast.Attribute) and owner.attr == name and last_name(owner.value) == "self"
                by_all = facts.sites.get(method) or rest or BY_ALL.search(method.name)
                if used and by_all and _on_all_ranks(facts, call, method) and guard(facts, call, method) is None:
                    yield call, method, f"self.{name}"
                    return


def _on_all_ranks(facts: Facts, node: ast.AST, scope: Scope) -> bool:
    """Whether a line stands under no test, and in no try and no inner function."""
    inside = any(isinstance(parent, (ast.Try, ast.While)) for _, parent in scope.module.ancestors(node))
    return not inside and scope.module.scope_of(node) is scope and not facts.conditions(node, scope)
