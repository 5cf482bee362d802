"""Walks over a tree, as those of ast, but worked out once for each node: rules walk the same statements many times.

What a node's `__dict__` keeps for them must not be changed by who reads it.
"""

import ast


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below a node, in the order of its fields; without Load and Store, which say nothing alone."""
    known = node.__dict__
    found: list[ast.AST] | None = known.get("below")
    if found is None:
        found = []
        for name in node._fields:
            value = known.get(name)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
        known["below"] = found
    return found


def walk(node: ast.AST) -> list[ast.AST]:
    """A node and all below it, level by level."""
    found: list[ast.AST] | None = node.__dict__.get("within")
    if found is None:
        found = [node]
        for each in found:
            found += each.__dict__.get("below") or children(each)
        node.__dict__["within"] = found
    return found


def calls(node: ast.AST) -> list[ast.Call]:
    """The calls of `walk`."""
    found: list[ast.Call] | None = node.__dict__.get("calls")
    if found is None:
        found = node.__dict__["calls"] = [each for each in walk(node) if isinstance(each, ast.Call)]
    return found


def text_of(node: ast.AST) -> str:
    """The node as it would be written: as ast.unparse, whose printer takes ten times as long for what is plain."""
    found: str | None = node.__dict__.get("text")
    if found is None:
        found = node.__dict__["text"] = _plain(node) or ast.unparse(node)
    return found


_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)  # never in parentheses, whatever follows


def _plain(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if isinstance(value, _ATOMS):
            return f"{text_of(value)}.{attr}"
        case ast.Call(func=function, args=args, keywords=keywords) if isinstance(function, _ATOMS):
            given = [*map(text_of, args), *(f"{each.arg}={text_of(each.value)}" for each in keywords if each.arg)]
            return f"{text_of(function)}({', '.join(given)})" if all(each.arg for each in keywords) else ""
        case ast.Subscript(value=value, slice=index) if isinstance(value, _ATOMS) and not isinstance(index, ast.Tuple):
            return f"{text_of(value)}[{text_of(index)}]"
        case ast.Constant(value=str() | bool() | int() | None as value, kind=None):
            return repr(value)
    return ""


def yields(function: ast.AST) -> bool:
    """Whether a function is a generator."""
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in walk(function))
