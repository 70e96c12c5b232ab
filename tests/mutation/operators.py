"""Mutation operators: small wrong changes of a Python file, located in its syntax tree and applied to its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
NAMES = {"amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin", "cos": "sin", "sin": "cos"}
NAMES |= {"min": "max", "max": "min", "sum": "mean", "mean": "sum", "floor": "ceil", "ceil": "floor"}


class Mutant(NamedTuple):
    """One change of a file: `text[start:stop]` becomes `new`."""

    path: str
    line: int
    kind: str
    start: int
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.old!r} -> {self.new!r}"

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.stop :]


class _Finder(ast.NodeVisitor):
    """Visitor that collects the mutants of a file; it skips raised errors, annotations and docstrings."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        lines = text.splitlines(keepends=True)
        self.offsets = [0]
        for line in lines:
            self.offsets.append(self.offsets[-1] + len(line.encode()))
        self.bytes = text.encode()
        self.found: list[Mutant] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and end of a node, in characters."""
        start = self.offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        stop = self.offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return len(self.bytes[:start].decode()), len(self.bytes[:stop].decode())

    def add(self, node: ast.AST, kind: str, start: int, stop: int, new: str) -> None:
        mutant = Mutant(self.path, node.lineno, kind, start, stop, self.text[start:stop], new)  # type: ignore[attr-defined]
        try:
            ast.parse(mutant.applied(self.text))
        except SyntaxError:
            return
        self.found.append(mutant)

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        """Return the span of the operator between two operands, without parentheses and blanks."""
        start, stop = self.span(left)[1], self.span(right)[0]
        while start < stop and self.text[start] in ") \n\t":
            start += 1
        while stop > start and self.text[stop - 1] in "( \n\t":
            stop -= 1
        return start, stop

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip raised errors."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Skip default values of fields: they are settings, and a test could only repeat them."""
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign):
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
            self.add(node, "comparison", *self.between(left, right), COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = ARITHMETIC.get(type(node.op))
        if new is not None and not isinstance(node.left, ast.JoinedStr):
            self.add(node, "arithmetic", *self.between(node.left, node.right), new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = "or" if isinstance(node.op, ast.And) else "and"
        self.add(node, "logic", *self.between(node.values[0], node.values[1]), new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            start, stop = self.span(node)
            self.add(node, "sign", start, stop, self.text[slice(*self.span(node.operand))])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", *self.span(node), str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", *self.span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self.add(node, "constant", *self.span(node), repr(2 * node.value + (node.value == 0)))

    def visit_If(self, node: ast.If) -> None:
        start, stop = self.span(node.test)
        self.add(node, "condition", start, stop, f"not ({self.text[start:stop]})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        start, stop = self.span(node.test)
        self.add(node, "condition", start, stop, f"not ({self.text[start:stop]})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, ast.Call):
            self.add(node, "deletion", *self.span(node), "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "deletion", *self.span(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict", "encoding"):  # these have no effect on valid inputs
                start, stop = self.span(keyword)
                self.add(keyword, "argument", start, self._comma(stop), "")
        if isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
            stop = self.span(node.func)[1]
            self.add(node, "function", stop - len(node.func.attr), stop, NAMES[node.func.attr])
        self.generic_visit(node)

    def _comma(self, stop: int) -> int:
        while self.text[stop] in " \n\t":
            stop += 1
        return stop + (self.text[stop] == ",")


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """Yield all mutants of a file in the order of their positions."""
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    yield from sorted(finder.found, key=lambda mutant: (mutant.start, mutant.stop, mutant.new))
