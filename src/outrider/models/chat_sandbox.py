"""Runs a chat template that came with a model file, and so may be hostile.

Jinja's immutable sandbox keeps templates away from attributes and files. It bounds neither time nor memory, so this
environment does: every loop turn, call and filter is counted against one budget of a rendering, and every operation that
makes text or lists longer is charged by its result before (where it could be huge) or after it runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import Environment, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from outrider.errors import PromptError

__all__ = ["MAX_CHARACTERS", "MAX_SECONDS", "MAX_STEPS", "render_template", "uses_variable"]

MAX_CHARACTERS = 64 * 2**20
"""Most characters (and list items) that one rendering may make, intermediate ones included."""
MAX_STEPS = 1_000_000
"""Most loop turns, calls and filters of one rendering."""
MAX_SECONDS = 5.0
"""Longest time of one rendering."""

_MAX_TEMPLATE = 2**20
_MAX_NUMBER_BITS = 256
_MAX_WIDTH = 10_000
_ITEM_CHARACTERS = 64  # what an item of a list costs beside its text; keeps the counting itself short
_WIDE_FORMAT = re.compile(r"\d{5,}|%[-+ #0]*\*|%[-+ #0\d]*\.\*|\{[^{}]*:[^{}]*\{")
_TOO_WIDE = f"the chat template formats text into an enormous width (allowed: {_MAX_WIDTH}); it was stopped"
_WIDTH_OPERATIONS = (
    *("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"),  # filters
    *("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"),  # methods
)
_TEXT_FILTERS = (
    *("capitalize", "center", "e", "escape", "forceescape", "lower", "replace", "safe", "string", "striptags"),
    *("title", "trim", "truncate", "upper", "urlencode", "wordcount"),
)
_REMOVED_FILTERS = ("pprint", "urlize", "xmlattr")


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_characters = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise PromptError(f"the chat template takes more than {MAX_STEPS} steps; it was stopped")
        if self._num_steps % 256 == 0 and time.monotonic() > self._deadline:
            raise PromptError(f"the chat template takes longer than {MAX_SECONDS:.0f} s; it was stopped")

    def charge(self, num_characters: int) -> None:
        self._num_characters += num_characters
        if self._num_characters > MAX_CHARACTERS:
            raise PromptError(f"the chat template makes more than {MAX_CHARACTERS} characters; it was stopped")


_budget: ContextVar[_Budget] = ContextVar("outrider_template_budget")


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """Render a chat template within its bounds.

    Raises:
        PromptError: a syntax error, an error that the template raises, or a bound that it crosses.
    """
    token = _budget.set(_Budget())
    try:
        return _compiled(source).render(dict(variables))
    except PromptError:
        raise
    except TemplateError as error:
        raise PromptError(f"the chat template refuses this chat: {error}") from None
    except Exception as error:  # a template can raise whatever Python can
        raise PromptError(f"the chat template fails on this chat: {type(error).__name__}: {error}") from None
    finally:
        _budget.reset(token)


def uses_variable(source: str, name: str) -> bool:
    """True if the template reads the variable ``name`` anywhere.

    Raises:
        PromptError: a syntax error.
    """
    try:
        return name in meta.find_undeclared_variables(_environment().parse(source))
    except (TemplateError, RecursionError) as error:
        raise PromptError(f"the chat template is broken: {error}") from None


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > _MAX_TEMPLATE:
        raise PromptError(f"the chat template has {len(source)} characters; allowed: {_MAX_TEMPLATE}")
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_printed,
        extensions=[_GenerationTag, loopcontrols],
    )
    for name in _REMOVED_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters |= {"tojson": _to_json, "join": _join, "sum": _sum}
    environment.filters |= {name: _bounded(name, function) for name, function in environment.filters.items()}
    environment.filters |= {"_turns": _turns, "_concat": _concat}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox with counted loops, calls, filters, operators and concatenations."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter_node(loop.iter, "_turns")
        counted: nodes.Template = _ConcatAsFilter().visit(tree)
        return counted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().step()
        _charge_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str | bytes | int):
            if name == "join":
                args = tuple([*arg] if isinstance(arg, Iterator) else arg for arg in args)
            _charge_text_operation(name, (owner, *args, *kwargs.values()))
        return _charged(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        formatted, text = wrapped, value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            _charge_format(text, "{", (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return bounded

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what a template, macro or block puts out."""
        return "".join(_charged(part) for part in parts)


class _ConcatAsFilter(NodeTransformer):
    """Turns ``a ~ b`` into a filter, which can be counted; Jinja would compile it to a plain join."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter_node(nodes.List(node.nodes, lineno=node.lineno), "_concat")


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter_node(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charged(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict):
        _budget.get().charge(len(value))
    return value


def _turns(values: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each counted as a step."""
    budget = _budget.get()
    for value in values:
        budget.step()
        yield value


def _printed(value: Any) -> Any:
    """Whatever is about to become text is charged first: a short list may hold one long text a million times."""
    _budget.get().charge(_length(value))
    return value


def _concat(parts: Sequence[Any]) -> str:
    _budget.get().step()
    return "".join(str(_printed(part)) for part in parts)


@jinja2.pass_environment
def _join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, each item charged before it is joined."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    texts = [str(_printed(item)) for item in items]
    _budget.get().charge(len(texts) * _length(d))
    return str(d).join(texts)


@jinja2.pass_environment
def _sum(
    environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    """Jinja's filter, of numbers only: summing lists copies each of them again and again."""
    if not isinstance(start, int | float):
        raise TemplateError("the filter sum adds numbers only")
    return sum(iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable), start=start)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step and is charged for what it makes."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        # What a filter works on stands behind the context or environment that some filters are handed first.
        given = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, Context | EvalContext | Environment)]
        _charge_text_operation(name, given)
        return _charged(function(*args, **kwargs))

    return bounded


def _charge_operands(operator: str, left: Any, right: Any) -> None:
    """Charge what an operator is about to make; refuse numbers that grow without end."""
    budget = _budget.get()
    if operator == "%" and isinstance(left, str | bytes):
        return _charge_format(str(left), "%", right if isinstance(right, tuple) else (right,))
    sized = [value for value in (left, right) if isinstance(value, str | bytes | list | tuple)]
    if operator == "+":
        budget.charge(sum(map(len, sized)))
    elif operator == "*" and sized:
        times = right if sized[0] is left else left
        budget.charge(len(sized[0]) * max(0, times) if isinstance(times, int) else 0)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_NUMBER_BITS:
            raise PromptError(f"the chat template computes a number of {bits} bits; it was stopped")


def _charge_text_operation(name: str, given: Sequence[Any]) -> None:
    """Charge what a filter or method makes at worst, ``given`` what it works on and its arguments.

    Results that are at most a few times as long as what they are made of are charged after, by their length.
    """
    text, others = (given[0], given[1:]) if given else ("", ())
    budget = _budget.get()
    if name == "translate":
        raise PromptError("the chat template calls translate, which is not allowed")
    if name in _WIDTH_OPERATIONS and any(isinstance(arg, int) and abs(arg) > _MAX_WIDTH for arg in others):
        raise PromptError(_TOO_WIDE)
    if name in ("indent", "expandtabs", "tojson", "wordwrap"):
        budget.charge(_length(text) * max([1, *(arg if isinstance(arg, int) else _length(arg) for arg in others)]))
    elif name == "format" and isinstance(text, str):
        _charge_format(text, "%", others)
    elif name == "replace" and len(others) > 1:
        num_found = text.count(others[0]) if isinstance(text, str | bytes) else _length(text) + 1
        budget.charge(num_found * _length(others[1]))
    elif name == "join" and isinstance(text, str | bytes) and others:
        budget.charge(_length(others[0]) * (1 + len(text)))
    elif name in _TEXT_FILTERS and not isinstance(text, str):
        budget.charge(_length(text))


def _charge_format(text: str, sign: str, given: Sequence[Any]) -> None:
    if _WIDE_FORMAT.search(text):
        raise PromptError(_TOO_WIDE)
    values = [value for arg in given for value in (arg.values() if isinstance(arg, Mapping) else (arg,))]
    _budget.get().charge(len(text) + text.count(sign) * max([0, *map(_length, values)]))


def _length(value: Any) -> int:
    """Characters of a value as text, lists and objects by all they hold; stops counting above the bound."""
    total, left = 0, [value]
    while left and total <= MAX_CHARACTERS:
        item = left.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, Collection) and not isinstance(item, range):
            left += item
        total += _ITEM_CHARACTERS
    return total


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: not escaped for HTML, keys in their own order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
