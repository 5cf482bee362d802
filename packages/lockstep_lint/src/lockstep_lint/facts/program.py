"""One program: a script with the local modules that it imports; who calls whom, and where values come from."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lockstep_lint.facts.modules import Binding, Module, Project, Scope, names_settings
from lockstep_lint.facts.sites import Site, call_site, start_site, started_function
from lockstep_lint.facts.tree import dotted_name, ends, keyword, last_name, literal, parts, within, words

DEPTH = 6  # steps that a value is followed back
MOST = 60  # values that one expression may come from, at most

PASSED_ON = frozenset(  # methods that give the object itself, or the same values elsewhere
    "to cuda cpu half float double bfloat16 detach clone requires_grad_ contiguous train eval".split()
)
WRAPPERS = frozenset(  # calls that give their first argument, wrapped or converted
    "DistributedDataParallel DDP DataParallel FullyShardedDataParallel FSDP convert_sync_batchnorm"
    " convert_syncbn_model compile deepcopy iter enumerate tqdm trange list tuple int str device set_device"
    " DistributedOptimizer script NativeDDP ApexDDP network_to_half convert_model auto_model auto_optim".split()
)
PREPARED = frozenset(
    ["prepare", "setup", "setup_dataloaders", "setup_module", "initialize", "prepare_model", "prepare_data_loader"]
)
COMMON = frozenset(  # methods that many classes have: by such a name no class is known
    "step forward train eval to load_state_dict state_dict backward update add get items append zero_grad log"
    " close write run save load reset fit test __init__ size keys values pop copy format join split parse_args"
    " cuda cpu item mean sum".split()
)
HARMLESS_MARKS = frozenset(["no_grad", "inference_mode", "wraps", "lru_cache", "cache", "contextmanager"])


class Value(NamedTuple):
    """An expression and the scope in which its names are to be looked up."""

    expr: ast.expr
    scope: Scope


@dataclass(frozen=True, slots=True)
class Links:
    """Where a function leads: targets with the call, if it is one, and calls of methods of unknown objects."""

    known: list[tuple[Scope, Site | None]]
    unknown: list[ast.Call]


class Condition(NamedTuple):
    """A test that decides whether a line runs, and the answer on which it does."""

    test: ast.expr
    answer: bool


class Program:
    """A script and what it reaches."""

    def __init__(self, project: Project, root: Module, whole: bool = False) -> None:
        self.project = project
        self.root = root
        self.whole = whole or not root.runs  # others may call all its functions
        self.modules = project.closure(root)
        self.sites: dict[Scope, list[Site]] = {}
        self.reached: dict[Scope, None] = {}  # in the order in which they are found
        self._values: dict[tuple[ast.expr, Scope, int | None, int], list[Value]] = {}
        self._names: dict[tuple[ast.AST, int], frozenset[str]] = {}
        self._methods: dict[str, list[Scope]] = {}  # of all its classes, by name
        self._reach()

    # Which functions run, and who calls them

    def _reach(self) -> None:
        queue: deque[Scope] = deque()

        def enter(scope: Scope | None) -> None:
            if scope is None or scope in self.reached:
                return
            self.reached[scope] = None
            queue.append(scope)
            if scope.is_class:
                for inner in scope.inner.values():
                    enter(inner)
                if isinstance(scope.node, ast.ClassDef):
                    for base in scope.node.bases:
                        enter(self.resolve(base, scope.outer or scope))
            elif scope.is_function:
                for inner in scope.inner.values():
                    enter(inner)

        for module in self.modules:
            enter(module.scope)
            for inner in module.scope.inner.values():
                marks = {last_name(each) for each in getattr(inner.node, "decorator_list", [])}
                if module is self.root and (self.whole or marks - HARMLESS_MARKS):
                    enter(inner)
        while queue:
            scope = queue.popleft()
            links = self.project.links.get(scope)
            if links is None:
                links = self.project.links[scope] = self._links(scope)
            imported = not scope.is_function and scope.module is not self.root
            for target, site in links.known:
                if imported and site and scope.module.behind_main(site.call):
                    continue
                enter(target)
                if site:
                    called = self.method(target, "__init__") if target.is_class else target
                    self.sites.setdefault(called or target, []).append(site)
            for call in links.unknown:
                if method := self.resolve(call.func, scope):
                    enter(method)
                    self.sites.setdefault(method, []).append(call_site(call, scope, method))

    def _links(self, scope: Scope) -> Links:
        """The functions and classes that a function calls, hands over or binds."""
        links = Links([], [])
        for call in scope.calls:
            if target := self._known(call.func, scope):
                called = self.method(target, "__init__") if target.is_class else target
                links.known.append((target, call_site(call, scope, called or target)))
            elif isinstance(call.func, ast.Attribute) and call.func.attr not in COMMON:
                links.unknown.append(call)
            starts = started_function(call)
            for value in (*call.args, *(each.value for each in call.keywords)):
                for part in parts(value):
                    if isinstance(part, (ast.Name, ast.Attribute)) and (target := self._known(part, scope)):
                        links.known.append((target, start_site(call, scope) if value is starts else None))
        for bindings in (*scope.bindings.values(), *scope.attributes.values()):
            for binding in bindings:
                for part in parts(binding.value):
                    if isinstance(part, (ast.Name, ast.Attribute)) and (target := self._known(part, scope)):
                        links.known.append((target, None))
        return links

    def resolve(self, function: ast.expr, scope: Scope) -> Scope | None:
        """The function or class of this project that an expression names, or None."""
        target = self._known(function, scope)
        if target is None and isinstance(function, ast.Attribute) and function.attr not in COMMON:
            name = function.attr
            if name not in self._methods:
                self._methods[name] = [method for module in self.modules for method in module.methods.get(name, ())]
            known = self._methods[name]
            if len(known) == 1 and not self._outside(function.value, scope):
                return known[0]
        return target

    def _known(self, function: ast.expr, scope: Scope) -> Scope | None:
        targets = self.project.targets
        if function not in targets:
            targets[function] = None  # an alias of itself ends here
            targets[function] = self._resolve(function, scope)
        return targets[function]

    def _outside(self, base: ast.expr, scope: Scope) -> bool:
        """Whether a name is an imported module's, which is not of this project."""
        while isinstance(base, ast.Attribute):
            base = base.value
        return isinstance(base, ast.Name) and base.id in scope.module.imports and scope.lookup(base.id) is None

    def _resolve(self, function: ast.expr, scope: Scope) -> Scope | None:
        if isinstance(function, ast.Name):
            owner = scope.lookup(function.id)
            if owner and function.id in owner.inner:
                return owner.inner[function.id]
            if owner and (bindings := owner.bindings.get(function.id)) and function.id not in owner.params:
                value = bindings[0].value
                if isinstance(value, ast.Call) and last_name(value.func) == "partial" and value.args:
                    value = value.args[0]
                alias = isinstance(value, (ast.Name, ast.Attribute)) and bindings[0].kind == "assign"
                return self._known(value, owner) if alias and value is not None else None
            target = self.project.target(scope.module, function.id)
            return target if isinstance(target, Scope) else None
        if not isinstance(function, ast.Attribute):
            return None
        name, base = function.attr, function.value
        if isinstance(base, ast.Name) and base.id in ("self", "cls") and (owner := scope.owner):
            if found := self.method(owner, name):
                return found
            bindings = owner.attributes.get(name, [])
            value = bindings[0].value if bindings else None
            return self._known(value, bindings[0].scope) if isinstance(value, (ast.Name, ast.Attribute)) else None
        if isinstance(module := self._module(base, scope), Module):
            target = self.project.target(module, name)
            return target if isinstance(target, Scope) else None
        kind = self._class_of(base, scope)
        return self.method(kind, name) if kind else None

    def _module(self, base: ast.expr, scope: Scope) -> Module | None:
        if isinstance(base, ast.Name):
            if base.id not in scope.module.imports or scope.lookup(base.id):
                return None
            target = self.project.target(scope.module, base.id)
            return target if isinstance(target, Module) else None
        if isinstance(base, ast.Attribute) and (dotted := dotted_name(base)) in scope.module.imports:
            return self.project.find(scope.module, dotted)
        return None

    def _class_of(self, base: ast.expr, scope: Scope) -> Scope | None:
        """The class of an object, where the name is bound to a call of it."""
        if isinstance(base, ast.Call):
            bindings = [base]
        elif isinstance(base, ast.Name) and (owner := scope.lookup(base.id)):
            bindings = [each.value for each in owner.bindings.get(base.id, []) if isinstance(each.value, ast.Call)]
            scope = owner
        elif isinstance(base, ast.Attribute) and last_name(base.value) == "self" and (owner := scope.owner):
            found = owner.attributes.get(base.attr, [])
            bindings = [each.value for each in found if isinstance(each.value, ast.Call)]
        else:
            return None
        for call in bindings:
            target = self._known(call.func, scope)
            if target and target.is_class:
                return target
        return None

    def method(self, kind: Scope, name: str, depth: int = 4) -> Scope | None:
        """A method of a class or of its bases in this project."""
        if name in kind.inner:
            return kind.inner[name]
        if depth and isinstance(kind.node, ast.ClassDef):
            for base in kind.node.bases:
                above = self.resolve(base, kind.outer or kind)
                if above and above.is_class and above is not kind and (found := self.method(above, name, depth - 1)):
                    return found
        return None

    @cached_property
    def _workers(self) -> frozenset[Scope]:
        """The functions that started processes run; empty where the program starts none."""
        callers: dict[Scope, set[Scope]] = {}
        for target, sites in self.sites.items():
            for site in sites:
                callers.setdefault(site.scope, set()).add(target)
        found: set[Scope] = set()
        queue = deque(target for target, sites in self.sites.items() if any(site.spawned for site in sites))
        while queue:
            scope = queue.popleft()
            if scope in found:
                continue
            found.add(scope)
            queue.extend(scope.inner.values())
            queue.extend(callers.get(scope, ()))
            if scope.name == "__init__" and scope.outer:
                queue.append(scope.outer)
        return frozenset(found)

    def per_rank(self, scope: Scope) -> bool:
        """Whether each of several processes runs a function; a parent that only starts them does not count."""
        return not self._workers or scope in self._workers

    def says(self, pattern: str) -> bool:
        """Whether a regular expression is found in one of its files."""
        return any(module.says(pattern) for module in self.modules)

    # Calls

    def named(self, pattern: str) -> bool:
        """Whether something is called whose last name fits a regular expression."""
        return any(re.search(pattern, name) for name in self.by_name)

    def results(self, call: ast.Call, scope: Scope) -> frozenset[str]:
        """The names that a call's result is assigned to."""
        for child, _ in scope.module.ancestors(call):
            if isinstance(child, ast.stmt):
                return words(*getattr(child, "targets", []))
        return frozenset()

    def derived(self, names: frozenset[str], scope: Scope) -> frozenset[str]:
        """Names, and those that a function computes from them."""
        found = set(names)
        for _ in range(2):
            for name, bindings in scope.bindings.items():
                if any(each.kind in ("assign", "item") and words(each.value) & found for each in bindings):
                    found.add(name)
        return frozenset(found - {"self"})

    @cached_property
    def by_name(self) -> dict[str, list[tuple[ast.Call, Scope]]]:
        """All calls that the program reaches, by the last part of the name."""
        found: dict[str, list[tuple[ast.Call, Scope]]] = {}
        for scope in self.reached:
            imported = not scope.is_function and scope.module is not self.root
            for call in scope.calls:
                if imported and scope.module.behind_main(call):
                    continue
                found.setdefault(last_name(call.func), []).append((call, scope))
        return found

    def calls(self, *names: str) -> Iterator[tuple[ast.Call, Scope]]:
        """The reached calls of functions with one of these last names."""
        for name in names:
            yield from self.by_name.get(name, [])

    def names_called(self, node: ast.AST, scope: Scope, deep: int = 1) -> frozenset[str]:
        """Last names of all that is called below a node, and in the project's functions that are called there."""
        key = (node, deep)
        if key not in self._names:
            self._names[key] = frozenset()  # a circle adds nothing
            found: set[str] = set()
            for call, where in calls_below(node, scope):
                found.add(last_name(call.func))
                if deep and (target := self.resolve(call.func, where)):
                    inside = self._body(target)
                    if inside is not None:
                        found |= self.names_called(inside.node, inside, deep - 1)
            self._names[key] = frozenset(found)
        return self._names[key]

    def _body(self, target: Scope) -> Scope | None:
        if not target.is_class:
            return target
        return self.method(target, "__call__") or self.method(target, "__init__")

    def qualified(self, expr: ast.AST, scope: Scope, depth: int = 2) -> str:
        """A name in full, by the file's imports: `torch.distributed.all_reduce`."""
        if isinstance(expr, ast.Call):
            return self.qualified(expr.func, scope, depth)
        if isinstance(expr, ast.Name):
            entry = scope.module.imports.get(expr.id)
            if entry is not None:
                return "." * entry.level + entry.dotted
            owner = scope.lookup(expr.id)
            bindings = owner.bindings.get(expr.id, []) if owner else []
            for binding in bindings:
                if depth and isinstance(binding.value, ast.Attribute) and binding.kind == "assign":
                    return self.qualified(binding.value, binding.scope, depth - 1)
            return expr.id
        if isinstance(expr, ast.Attribute):
            return f"{self.qualified(expr.value, scope, depth)}.{expr.attr}"
        return ""

    # Values

    def sources(self, expr: ast.expr | None, scope: Scope, index: int | None = None) -> list[Value]:
        """An expression and all that its value may come from: assignments, arguments, results, nearest first."""
        return self._sources(expr, scope, index, DEPTH) if expr is not None else []

    def _sources(self, expr: ast.expr, scope: Scope, index: int | None, depth: int) -> list[Value]:
        key = (expr, scope, index, depth)
        if key not in self._values:
            self._values[key] = [Value(expr, scope)]  # a circle ends here
            found = {Value(expr, scope): None}
            if depth:
                for value, where, element, cost in self._step(expr, scope, index):
                    for each in self._sources(value, where, element, depth - cost):
                        found[each] = None
                    if len(found) > MOST:
                        break
            self._values[key] = list(found)
        return self._values[key]

    def direct(self, expr: ast.expr, scope: Scope, depth: int = 3) -> list[Value]:
        """What a name is bound to and what a function of this project returns, without looking further into it."""
        found: list[Value] = []
        for value, where, index, _ in self._step(expr, scope, None):
            if isinstance(value, (ast.Name, ast.Attribute)) and depth:
                found += self.direct(value, where, depth - 1)
            elif index is None:
                found.append(Value(value, where))
        return found

    def _step(
        self, expr: ast.expr, scope: Scope, index: int | None
    ) -> Iterator[tuple[ast.expr, Scope, int | None, int]]:
        match expr:
            case ast.Name(id=name):
                owner = scope.lookup(name)
                if owner is not None:
                    yield from self._bound(owner.bindings.get(name, []), index, expr if owner is scope else None)
                    yield from self._given(owner, name, index)
                else:
                    yield from self._imported(scope.module, name, index)
            case ast.Attribute(value=base, attr=name):
                yield from self._attribute(base, name, scope, index)
            case ast.Call():
                yield from self._result(expr, scope, index)
            case ast.IfExp(body=body, orelse=orelse):
                yield body, scope, index, 0
                yield orelse, scope, index, 0
            case ast.BoolOp(values=values):
                for value in values:
                    yield value, scope, index, 0
            case ast.NamedExpr(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                yield value, scope, index, 0
            case ast.Tuple(elts=elements) | ast.List(elts=elements) if index is not None and index < len(elements):
                yield elements[index], scope, None, 0
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as position)) if index is None:
                yield value, scope, position, 1
            case ast.Subscript(value=value, slice=key):
                for each in self._sources(value, scope, None, 2):
                    if isinstance(each.expr, ast.Dict):
                        for name_, part in zip(each.expr.keys, each.expr.values, strict=True):
                            if name_ is not None and ast.dump(name_) == ast.dump(key):
                                yield part, each.scope, index, 1
                    elif isinstance(each.expr, ast.DictComp):
                        yield each.expr.value, each.scope, index, 1

    def _bound(
        self, bindings: list[Binding], index: int | None, use: ast.expr | None = None
    ) -> Iterator[tuple[ast.expr, Scope, int | None, int]]:
        if use is not None:  # in one function what is bound later does not count, where something is bound before
            earlier = [each for each in bindings if each.line < use.lineno and each.node is not use]
            bindings = earlier or bindings
        for binding in reversed(bindings):
            if binding.value is not None and binding.kind in ("assign", "with"):
                yield binding.value, binding.scope, binding.index if binding.index is not None else index, 1

    def _given(self, owner: Scope, name: str, index: int | None) -> Iterator[tuple[ast.expr, Scope, int | None, int]]:
        if name not in owner.params:
            return
        for site in self.sites.get(owner, []):
            if (argument := site.argument(owner, name)) is not None:
                yield argument, site.scope, index, 1
        if name in owner.defaults:
            yield owner.defaults[name], owner.outer or owner, index, 1

    def _imported(
        self, module: Module, name: str, index: int | None
    ) -> Iterator[tuple[ast.expr, Scope, int | None, int]]:
        entry = module.imports.get(name)
        source = self.project.find(module, entry.module, entry.level) if entry and entry.name else None
        if entry and entry.name and source:
            yield from self._bound(source.scope.bindings.get(entry.name, []), index)

    def _attribute(
        self, base: ast.expr, name: str, scope: Scope, index: int | None
    ) -> Iterator[tuple[ast.expr, Scope, int | None, int]]:
        if isinstance(base, ast.Name) and base.id in ("self", "cls") and scope.owner:
            yield from self._bound(self.attribute(scope.owner, name), index)
        elif names_settings(base):
            for module in self.modules:
                yield from self._bound(module.stores.get(name, []), index)
        elif (module_ := self._module(base, scope)) is not None:
            yield from self._bound(module_.scope.bindings.get(name, []), index)
        elif kind := self._class_of(base, scope):
            yield from self._bound(self.attribute(kind, name), index)

    def attribute(self, kind: Scope, name: str, depth: int = 3) -> list[Binding]:
        """What an attribute of a class's objects is set to, in the class or in its bases."""
        if found := kind.attributes.get(name) or kind.bindings.get(name):
            return found
        if depth and isinstance(kind.node, ast.ClassDef):
            for base in kind.node.bases:
                above = self.resolve(base, kind.outer or kind)
                if above and above.is_class and above is not kind and (found := self.attribute(above, name, depth - 1)):
                    return found
        return []

    def _result(
        self, call: ast.Call, scope: Scope, index: int | None
    ) -> Iterator[tuple[ast.expr, Scope, int | None, int]]:
        name = last_name(call.func)
        target = self.resolve(call.func, scope)
        if target and not target.is_class:
            for value in target.returns:
                yield value, target, index, 1
        elif name in PREPARED and call.args:
            if index is not None and index < len(call.args):
                yield call.args[index], scope, None, 0
            elif index is None and len(call.args) == 1:
                yield call.args[0], scope, None, 0
        elif name in PASSED_ON and isinstance(call.func, ast.Attribute):
            yield call.func.value, scope, index, 0
        elif name in WRAPPERS and call.args:
            yield call.args[0], scope, None if name == "enumerate" else index, 0
        elif name in WRAPPERS and (inner := keyword(call, "module") or keyword(call, "iterable")):
            yield inner, scope, index, 0

    def constant(self, expr: ast.expr | None, scope: Scope) -> object:
        """The one constant that an expression is, an option's default among them; ... where that is not known."""
        found = self.constants(expr, scope)
        return found.pop() if len(found) == 1 else ...

    def constants(self, expr: ast.expr | None, scope: Scope) -> set[object]:
        """The constants that an expression may be, an option's default among them."""
        found: set[object] = set()
        for value in self.sources(expr, scope):
            if isinstance(value.expr, ast.Constant) and isinstance(
                value.expr.value, (int, float, str, bool, type(None))
            ):
                found.add(value.expr.value)
            elif isinstance(value.expr, ast.Attribute) and (option := self.options.get(value.expr.attr)):
                default = keyword(option, "default")
                if isinstance(default, ast.Constant) and isinstance(default.value, (int, float, str, bool, type(None))):
                    found.add(default.value)
                elif default is None:
                    found.add({"store_true": False, "store_false": True}.get(str(literal(keyword(option, "action")))))
        return found

    @cached_property
    def options(self) -> dict[str, ast.Call]:
        """The options that argparse reads, by the attribute that they set."""
        found: dict[str, ast.Call] = {}
        for call in (call for module in self.modules for call in module.options):
            named = literal(keyword(call, "dest")) or next(
                (each for arg in call.args if str(each := literal(arg)).startswith("--")), None
            )
            if isinstance(named, str):
                found.setdefault(named.lstrip("-").replace("-", "_"), call)
        return found

    # Who runs a line

    def conditions(self, node: ast.AST, scope: Scope) -> list[Condition]:
        """The tests around a line and the early exits before it, up to its function, innermost first."""
        found: list[Condition] = []
        for child, parent in scope.module.ancestors(node):
            match parent:
                case ast.If(test=test) | ast.IfExp(test=test) if child is not test:
                    inside = child in parent.body if isinstance(parent, ast.If) else child is parent.body
                    found.append(Condition(test, inside))
                case ast.While(test=test) if child in parent.body:
                    found.append(Condition(test, True))
                case ast.BoolOp(op=operator, values=values):
                    for value in values[: values.index(child)] if child in values else []:
                        found.append(Condition(value, isinstance(operator, ast.And)))
            for block in (getattr(parent, each, None) for each in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and child in block:
                    found.extend(_exits(block[: block.index(child)]))
        return found


def _exits(before: list[ast.stmt]) -> Iterator[Condition]:
    for statement in reversed(before):
        if isinstance(statement, ast.If) and ends(statement.body) and not statement.orelse:
            yield Condition(statement.test, False)


def calls_below(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.Call, Scope]]:
    """The calls below a node of a scope, with their scopes; of a function, all of its own and its inner functions'."""
    for call in scope.calls:
        if within(call, node):
            yield call, scope
    for inner in scope.nested:
        if within(inner.node, node):
            yield from calls_below(inner.node, inner)
