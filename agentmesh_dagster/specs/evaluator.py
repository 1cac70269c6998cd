"""From the text of an expression to a closure: parsed by Jinja, compiled here, cached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import filters, sandbox
from agentmesh_dagster.specs.sandbox import Evaluation, Group, Loop, Missing, Refusal

MAX_SOURCE: Final = 200_000
"""Characters of one template or condition."""
MAX_TOKENS: Final = 10_000
"""Names, signs, literals and pieces of text of one template."""
_STEPS_PER_PART: Final = 50
"""What each part of a template costs at each evaluation: as much as to compile it, which happens once."""
MAX_DEPTH: Final = 100
"""Levels of nesting in the syntax tree of one template, chains of operators included."""
_FUNCTIONS: Final = frozenset(("range", "dict"))
_SECRET: Final = "secret"  # noqa: S105 -- the name of the function, not a secret
_PLAIN: Final = frozenset((str, int, float, bool, dict, list, type(None)))


class _TokenLimit(Extension):
    """Stops the parser of a template that is too large, before it has read the rest."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        for number, token in enumerate(stream):
            if number >= MAX_TOKENS:
                raise Refusal(f"it has more than {MAX_TOKENS} words and signs", "expression-limit")
            yield token


_ENVIRONMENT: Final = Environment(keep_trailing_newline=True, extensions=[_TokenLimit])  # noqa: S701 -- parses only; texts are not HTML

Thunk = Callable[[Evaluation], Any]
Block = Callable[[Evaluation, list[str]], None]


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled template or condition."""

    run: Thunk
    cost: int
    """Steps of one evaluation, loops and calls aside."""
    references: frozenset[tuple[str, ...]]
    secrets: frozenset[str]


@functools.lru_cache(maxsize=2048)
def compile_text(text: str, bare: bool) -> Program:
    if len(text) > MAX_SOURCE:
        raise Refusal(f"it is longer than {MAX_SOURCE} characters", "expression-limit")
    compiler = _Compiler()
    if bare:
        if not text.strip():
            raise Refusal("it is empty; write an expression such as input.amount > 500", "expression-syntax")
        if text.lstrip().startswith(("{{", "{%")):
            raise Refusal("write the bare expression, without {{ }}", "expression-syntax")
        parser = Parser(_ENVIRONMENT, text, state="variable")
        expression = parser.parse_expression()
        if not parser.stream.eos:
            raise Refusal("cannot be parsed: something follows the expression", "expression-syntax")
        run = compiler.result(expression)
    else:
        body = _ENVIRONMENT.parse(text).body
        single = _single_expression(text, body)
        run = compiler.result(single) if single is not None else compiler.text(body)
    cost = _STEPS_PER_PART * compiler.parts
    return Program(run, cost, frozenset(compiler.references), frozenset(compiler.secrets))


def _single_expression(text: str, body: list[nodes.Node]) -> nodes.Expr | None:
    if len(body) == 1 and isinstance(body[0], nodes.Output) and text.startswith("{{") and text.endswith("}}"):
        parts = body[0].nodes
        if len(parts) == 1 and not isinstance(parts[0], nodes.TemplateData):
            return parts[0]
    return None


def _source(node: nodes.Node) -> str:
    """How the author wrote a path, for errors."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        return f"{_source(node.node)}.{node.attr}"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            key = node.arg.value
            return f"{_source(node.node)}.{key}" if isinstance(key, str) else f"{_source(node.node)}[{key!r}]"
        return f"{_source(node.node)}[...]"
    return "the value"


class _Compiler:
    """Turns syntax trees into closures, and notes on the way what they refer to."""

    def __init__(self) -> None:
        self.references: set[tuple[str, ...]] = set()
        self.secrets: set[str] = set()
        self.parts = 0
        """Expressions and statements."""
        self._locals: list[set[str]] = [set()]
        self._depth = 0

    # Results ------------------------------------------------------------------------------------------------

    def result(self, node: nodes.Expr) -> Thunk:
        value_of = self.value(node)
        looked_up = isinstance(node, (nodes.Name, nodes.Getattr, nodes.Getitem))

        def run(state: Evaluation) -> Json:
            value = value_of(state)
            if value is True or value is False or (looked_up and type(value) in _PLAIN):
                return value
            return sandbox.to_json(state, value)

        return run

    def text(self, body: list[nodes.Node]) -> Thunk:
        write = self.block(body)

        def run(state: Evaluation) -> str:
            out: list[str] = []
            write(state, out)
            return _joined(out)

        return run

    # Expressions --------------------------------------------------------------------------------------------

    def value(self, node: nodes.Expr) -> Thunk:
        """A closure that gives the value, and refuses a missing one."""
        found = self.maybe(node)
        if not isinstance(
            node,
            (
                nodes.Name,
                nodes.Getattr,
                nodes.Getitem,
                nodes.Filter,
                nodes.CondExpr,
                nodes.Call,
                nodes.And,
                nodes.Or,
            ),
        ):
            return found

        def run(state: Evaluation) -> Any:
            value = found(state)
            if type(value) is Missing:
                raise value.refusal()
            return value

        return run

    def maybe(self, node: nodes.Expr) -> Thunk:
        """A closure that gives the value or `Missing`."""
        build = _EXPRESSIONS.get(type(node))
        if build is None:
            raise Refusal(
                f"{type(node).__name__.lower()} is not available in expressions", "expression-refused"
            )
        self.parts += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refusal(f"it is nested more than {MAX_DEPTH} levels deep", "expression-limit")
        made = build(self, node)
        self._depth -= 1
        return made

    def _is_local(self, name: str) -> bool:
        return any(name in scope for scope in self._locals)

    def const(self, node: nodes.Const) -> Thunk:
        value = node.value
        if type(value) is int and value.bit_length() > sandbox.MAX_INT_BITS:
            raise Refusal(f"an integer has more than {sandbox.MAX_INT_BITS} bits", "expression-limit")
        return lambda state: value

    def name(self, node: nodes.Name) -> Thunk:
        if node.name == _SECRET:
            raise Refusal("secret is called with one literal name: secret('NAME')", "expression-refused")
        self._refer((node.name,))
        return self._name_lookup(node.name)

    def _name_lookup(self, name: str) -> Thunk:
        def run(state: Evaluation) -> Any:
            try:
                return state.names[name]
            except KeyError:
                return Missing("", name, state.names)

        if not self._is_local(name):
            return run

        def run_local(state: Evaluation) -> Any:
            variables = state.variables
            return variables[name] if name in variables else run(state)

        return run_local

    def _refer(self, path: tuple[str, ...]) -> None:
        if not self._is_local(path[0]) and path[0] not in _FUNCTIONS:
            self.references.add(path)

    def path(self, node: nodes.Getattr | nodes.Getitem) -> Thunk:
        """A chain of constant keys is followed in one closure; the chain is what `references` tells."""
        keys: list[tuple[Any, str]] = []
        root: nodes.Expr = node
        while True:
            if isinstance(root, nodes.Getattr):
                key = root.attr
            elif isinstance(root, nodes.Getitem) and isinstance(root.arg, nodes.Const):
                key = root.arg.value
            else:
                break
            if isinstance(key, str) and key.startswith("__"):
                raise Refusal(
                    f"names that begin with two underscores are refused: {key[:40]!r}", "expression-refused"
                )
            root = root.node
            keys.append((key, _source(root) if len(keys) < MAX_DEPTH else ""))
        if len(keys) > MAX_DEPTH:
            raise Refusal(f"it is nested more than {MAX_DEPTH} levels deep", "expression-limit")
        keys.reverse()
        if not keys:
            return self._item(cast("nodes.Getitem", node))
        if isinstance(root, nodes.Name) and root.name != _SECRET:
            names = [root.name]
            for key, _ in keys:
                if not isinstance(key, str):
                    break
                names.append(key)
            self._refer(tuple(names))
            find = self._name_lookup(root.name)
        else:
            find = self.maybe(root)

        def run(state: Evaluation) -> Any:
            value = find(state)
            for key, owner in keys:
                # The exact type is the common case; all others take the same rules the long way.
                if type(value) is dict and key in value:
                    value = cast("dict[Any, Any]", value)[key]
                else:
                    value = sandbox.lookup(value, key, owner)
            return value

        return run

    def _item(self, node: nodes.Getitem) -> Thunk:
        owner, find = _source(node.node), self.maybe(node.node)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(node.arg, owner, self.value(node.node))
        key_of = self.value(node.arg)

        def run(state: Evaluation) -> Any:
            return sandbox.lookup(find(state), key_of(state), owner)

        return run

    def _slice(self, node: nodes.Slice, owner: str, find: Thunk) -> Thunk:
        ends = [None if end is None else self.value(end) for end in (node.start, node.stop, node.step)]

        def run(state: Evaluation) -> Any:
            value = find(state)
            places = [None if end is None else end(state) for end in ends]
            if not isinstance(value, (str, list, tuple, range)) or places[2] == 0:
                raise Refusal(f"cannot take a slice of {owner}, {sandbox.kind_of(cast('object', value))}")
            if any(type(place) not in (int, type(None)) for place in places):
                raise Refusal("the ends of a slice are integers")
            made = cast("list[Any]", value)[slice(*places)]
            if isinstance(made, str):
                return state.made(made)
            return sandbox.items_of(state, made)

        return run

    def list_of(self, node: nodes.List | nodes.Tuple) -> Thunk:
        items = [self.value(item) for item in node.items]
        return lambda state: [item(state) for item in items]

    def object_of(self, node: nodes.Dict) -> Thunk:
        pairs = [(self.value(pair.key), self.value(pair.value)) for pair in node.items]

        def run(state: Evaluation) -> dict[str, Any]:
            made: dict[str, Any] = {}
            for key_of, value_of in pairs:
                key = key_of(state)
                if not isinstance(key, str):
                    raise Refusal(f"keys of an object are text, and one is {sandbox.kind_of(key)}")
                made[key] = value_of(state)
            return made

        return run

    def conditional(self, node: nodes.CondExpr) -> Thunk:
        test, yes = self.value(node.test), self.maybe(node.expr1)
        if node.expr2 is None:
            raise Refusal("an inline 'if' needs an 'else'", "expression-syntax")
        no = self.maybe(node.expr2)
        return lambda state: yes(state) if test(state) else no(state)

    def conjunction(self, node: nodes.And) -> Thunk:
        left, right = self.value(node.left), self.value(node.right)
        return lambda state: left(state) and right(state)

    def disjunction(self, node: nodes.Or) -> Thunk:
        left, right = self.maybe(node.left), self.maybe(node.right)

        def run(state: Evaluation) -> Any:
            value = left(state)
            if type(value) is Missing:
                if not value.is_skipped:
                    raise value.refusal()
                return right(state)
            return value or right(state)

        return run

    def negation(self, node: nodes.Not) -> Thunk:
        value_of = self.value(node.node)
        return lambda state: not value_of(state)

    def sign(self, node: nodes.Neg | nodes.Pos) -> Thunk:
        value_of, negative = self.value(node.node), isinstance(node, nodes.Neg)

        def run(state: Evaluation) -> Any:
            value = value_of(state)
            if not isinstance(value, (int, float)):
                raise Refusal(f"a sign stands before {sandbox.kind_of(value)}")
            sandbox.bounded(state, value)
            return -value if negative else +value

        return run

    def binary(self, node: nodes.BinExpr) -> Thunk:
        calculate = sandbox.OPERATORS[node.operator]
        left, right = self.value(node.left), self.value(node.right)
        return lambda state: calculate(state, left(state), right(state))

    def concat(self, node: nodes.Concat) -> Thunk:
        parts = [self.value(part) for part in node.nodes]
        return lambda state: sandbox.join_text(state, [part(state) for part in parts], "")

    def comparison(self, node: nodes.Compare) -> Thunk:
        first = self.value(node.expr)
        steps = [(_COMPARISONS[operand.op], self.value(operand.expr)) for operand in node.ops]

        def run(state: Evaluation) -> bool:
            left = first(state)
            for holds, right_of in steps:
                right = right_of(state)
                if not holds(state, left, right):
                    return False
                left = right
            return True

        return run

    def _arguments(
        self, node: nodes.Call | nodes.Filter | nodes.Test
    ) -> Callable[[Evaluation], tuple[list[Any], dict[str, Any]]]:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Refusal("arguments with * or ** are not available", "expression-refused")
        args = [self.value(arg) for arg in node.args]
        kwargs = [(cast("str", pair.key), self.value(pair.value)) for pair in node.kwargs]
        return lambda state: ([arg(state) for arg in args], {key: value(state) for key, value in kwargs})

    def filtered(self, node: nodes.Filter | nodes.Test) -> Thunk:
        is_filter = isinstance(node, nodes.Filter)
        if node.node is None:
            raise Refusal("a filter needs a value", "expression-syntax")
        name, table = node.name, filters.FILTERS if is_filter else filters.TESTS
        if name not in table:
            raise Refusal(filters.unknown("filter" if is_filter else "test", name), "expression-refused")
        subject = self.maybe(node.node) if name in filters.TAKES_MISSING else self.value(node.node)
        arguments = self._arguments(node)
        apply = filters.apply_filter if is_filter else filters.apply_test
        return lambda state: apply(state, name, subject(state), *arguments(state))

    def call(self, node: nodes.Call) -> Thunk:
        target = node.node
        if isinstance(target, nodes.Getattr):
            if target.attr.startswith("_") or target.attr not in sandbox.METHODS:
                hint = "; write 'text' ~ value or '%s' % value" if target.attr.startswith("format") else ""
                raise Refusal(f"there is no method {target.attr[:40]!r} here{hint}", "expression-refused")
            owner, name, value_of = _source(target.node), target.attr, self.maybe(target.node)
            arguments = self._arguments(node)
            return lambda state: sandbox.call_method(state, value_of(state), name, *arguments(state), owner)
        if not isinstance(target, nodes.Name):
            raise Refusal("only functions and methods are called", "expression-refused")
        arguments = self._arguments(node)
        if target.name == "range":
            return lambda state: sandbox.safe_range(state, *arguments(state)[0])
        if target.name == "dict":
            if node.args:
                raise Refusal("dict takes named values: dict(a=1)", "expression-refused")
            return lambda state: arguments(state)[1]
        if target.name == _SECRET:
            self._note_secret(node)
        return self._call_given(target.name, arguments)

    def _note_secret(self, node: nodes.Call) -> None:
        name = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(name, nodes.Const) or not isinstance(name.value, str):
            raise Refusal("secret is called with one literal name: secret('NAME')", "expression-refused")
        self.secrets.add(name.value)

    def _call_given(
        self, name: str, arguments: Callable[[Evaluation], tuple[list[Any], dict[str, Any]]]
    ) -> Thunk:
        """Calls a function that stands among the given names; JSON values are never functions."""

        def run(state: Evaluation) -> Any:
            function = state.names.get(name)
            if not callable(function):
                raise Refusal(f"there is no function {name!r} here", "expression-refused")
            args, kwargs = arguments(state)
            return function(*args, **kwargs)

        return run

    # Statements ---------------------------------------------------------------------------------------------

    def block(self, body: list[nodes.Node]) -> Block:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refusal(f"it is nested more than {MAX_DEPTH} levels deep", "expression-limit")
        parts: list[Block] = []
        for node in body:
            build = _STATEMENTS.get(type(node))
            if build is None:
                word = type(node).__name__.lower()
                raise Refusal(f"the statement {word!r} is not available in templates", "expression-refused")
            self.parts += 1
            parts.append(build(self, node))
        self._depth -= 1

        def run(state: Evaluation, out: list[str]) -> None:
            for part in parts:
                part(state, out)

        return run

    def output(self, node: nodes.Output) -> Block:
        parts = [p.data if isinstance(p, nodes.TemplateData) else self.value(p) for p in node.nodes]

        def run(state: Evaluation, out: list[str]) -> None:
            for part in parts:
                text = part if isinstance(part, str) else sandbox.to_text(state, part(state))
                out.append(state.made(text))

        return run

    def if_block(self, node: nodes.If) -> Block:
        branches = [(self.value(cast("nodes.Expr", n.test)), self.block(n.body)) for n in (node, *node.elif_)]
        otherwise = self.block(node.else_)

        def run(state: Evaluation, out: list[str]) -> None:
            for test, body in branches:
                if test(state):
                    body(state, out)
                    return
            otherwise(state, out)

        return run

    def _targets(self, node: nodes.Node) -> Callable[[dict[str, Any], Any], None]:
        """Binds names to a value; several names take a list apart."""
        if isinstance(node, nodes.Tuple):
            parts = [self._targets(item) for item in node.items]

            def bind_each(variables: dict[str, Any], value: Any) -> None:
                if not isinstance(value, (list, Group)) or len(cast("list[Any]", value)) != len(parts):
                    raise Refusal(f"{len(parts)} names need a list of {len(parts)} items")
                for part, item in zip(parts, cast("list[Any]", value), strict=True):
                    part(variables, item)

            return bind_each
        if not isinstance(node, nodes.Name) or node.name in (_SECRET, "range", "dict"):
            raise Refusal("a value is given to plain names only", "expression-refused")
        name = node.name
        self._locals[-1].add(name)

        def bind(variables: dict[str, Any], value: Any) -> None:
            variables[name] = value

        return bind

    def for_block(self, node: nodes.For) -> Block:
        if node.recursive:
            raise Refusal("recursive loops are not available", "expression-refused")
        items_in = self.value(cast("nodes.Expr", node.iter))
        cost = 4 + sum(1 for part in node.body for _ in part.find_all(nodes.Node))
        self._locals.append({"loop"})
        bind = self._targets(node.target)
        test = None if node.test is None else self.value(cast("nodes.Expr", node.test))
        body = self.block(node.body)
        self._locals.pop()
        otherwise = self.block(node.else_)

        def run(state: Evaluation, out: list[str]) -> None:
            outer = state.variables
            items = sandbox.items_of(state, items_in(state))
            # Each item gets a copy of the variables.
            state.spend(len(items) * (len(outer) >> 4))
            try:
                if test is not None:
                    items = [item for item in items if _passes(state, item, outer)]
                for index, item in enumerate(items):
                    state.spend(cost)
                    state.variables = {**outer, "loop": _loop(items, index)}
                    bind(state.variables, item)
                    body(state, out)
            finally:
                state.variables = outer
            if not items:
                otherwise(state, out)

        def _passes(state: Evaluation, item: Any, outer: dict[str, Any]) -> bool:
            state.spend(cost)
            state.variables = dict(outer)
            bind(state.variables, item)
            return test is not None and bool(test(state))

        return run

    def assignment(self, node: nodes.Assign) -> Block:
        value_of = self.value(cast("nodes.Expr", node.node))
        bind = self._targets(node.target)

        def run(state: Evaluation, out: list[str]) -> None:
            bind(state.variables, value_of(state))

        return run

    def assignment_block(self, node: nodes.AssignBlock) -> Block:
        if node.filter is not None:
            raise Refusal("a 'set' block takes no filter", "expression-refused")
        body = self._scoped(node.body)
        bind = self._targets(node.target)

        def run(state: Evaluation, out: list[str]) -> None:
            inner: list[str] = []
            body(state, inner)
            bind(state.variables, _joined(inner))

        return run

    def with_block(self, node: nodes.With) -> Block:
        values = [self.value(value) for value in node.values]
        self._locals.append(set())
        binds = [self._targets(target) for target in node.targets]
        body = self.block(node.body)
        self._locals.pop()

        def run(state: Evaluation, out: list[str]) -> None:
            outer = state.variables
            given = [value(state) for value in values]
            state.variables = dict(outer)
            for bind, value in zip(binds, given, strict=True):
                bind(state.variables, value)
            try:
                body(state, out)
            finally:
                state.variables = outer

        return run

    def _scoped(self, body: list[nodes.Node]) -> Block:
        self._locals.append(set())
        inner = self.block(body)
        self._locals.pop()

        def run(state: Evaluation, out: list[str]) -> None:
            outer = state.variables
            state.variables = dict(outer)
            try:
                inner(state, out)
            finally:
                state.variables = outer

        return run


def _joined(parts: list[str]) -> str:
    if sum(map(len, parts)) > sandbox.MAX_TEXT:
        raise Refusal(f"it makes a text of more than {sandbox.MAX_TEXT} characters", "expression-limit")
    return "".join(parts)


def _loop(items: list[Any], index: int) -> Loop:
    count = len(items)
    loop = Loop(
        index=index + 1,
        index0=index,
        first=index == 0,
        last=index == count - 1,
        length=count,
        revindex=count - index,
        revindex0=count - index - 1,
    )
    if index:
        loop["previtem"] = items[index - 1]
    if index < count - 1:
        loop["nextitem"] = items[index + 1]
    return loop


_COMPARISONS: Final[Mapping[str, Callable[[Evaluation, Any, Any], bool]]] = {
    "eq": sandbox.equal,
    "ne": lambda state, a, b: not sandbox.equal(state, a, b),
    "lt": sandbox.less,
    "lteq": lambda state, a, b: not sandbox.less(state, b, a),
    "gt": lambda state, a, b: sandbox.less(state, b, a),
    "gteq": lambda state, a, b: not sandbox.less(state, a, b),
    "in": sandbox.contains,
    "notin": lambda state, a, b: not sandbox.contains(state, a, b),
}
_EXPRESSIONS: Final[Mapping[type[nodes.Node], Callable[[_Compiler, Any], Thunk]]] = {
    nodes.Const: _Compiler.const,
    nodes.Name: _Compiler.name,
    nodes.Getattr: _Compiler.path,
    nodes.Getitem: _Compiler.path,
    nodes.List: _Compiler.list_of,
    nodes.Tuple: _Compiler.list_of,
    nodes.Dict: _Compiler.object_of,
    nodes.CondExpr: _Compiler.conditional,
    nodes.And: _Compiler.conjunction,
    nodes.Or: _Compiler.disjunction,
    nodes.Not: _Compiler.negation,
    nodes.Neg: _Compiler.sign,
    nodes.Pos: _Compiler.sign,
    **dict.fromkeys(
        (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow), _Compiler.binary
    ),
    nodes.Concat: _Compiler.concat,
    nodes.Compare: _Compiler.comparison,
    nodes.Filter: _Compiler.filtered,
    nodes.Test: _Compiler.filtered,
    nodes.Call: _Compiler.call,
}
_STATEMENTS: Final[Mapping[type[nodes.Node], Callable[[_Compiler, Any], Block]]] = {
    nodes.Output: _Compiler.output,
    nodes.If: _Compiler.if_block,
    nodes.For: _Compiler.for_block,
    nodes.Assign: _Compiler.assignment,
    nodes.AssignBlock: _Compiler.assignment_block,
    nodes.With: _Compiler.with_block,
}
