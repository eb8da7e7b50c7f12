"""Runs a chat template that came with a model file, and so may be hostile.

Jinja's immutable sandbox keeps templates away from attributes and files. It bounds neither time nor memory, so this
environment does: every loop turn, call and filter is counted against one budget of a rendering, and every operation that
makes text or lists longer is charged by its result before (where it could be huge) or after it runs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from outrider.errors import PromptError

__all__ = ["MAX_CHARACTERS", "MAX_SECONDS", "MAX_STEPS", "render_template", "uses_variable"]

MAX_CHARACTERS = 64 * 2**20
"""Most characters (and list items) that one rendering may make, intermediate ones included."""
MAX_STEPS = 1_000_000
"""Most loop turns, calls and filters of one rendering."""
MAX_SECONDS = 10.0
"""Longest time of one rendering."""

_MAX_TEMPLATE = 2**20
_MAX_NUMBER_BITS = 256
_MAX_WIDTH = 10_000
_WIDE_FORMAT = re.compile(r"\d{5,}|%[-+ #0]*\*|%[-+ #0\d]*\.\*|\{[^{}]*:[^{}]*\{")
_TOO_WIDE = f"the chat template formats text into an enormous width (allowed: {_MAX_WIDTH}); it was stopped"
_WIDTH_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")
_WIDTH_METHODS = ("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill")
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
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, loopcontrols]
    )
    for name in _REMOVED_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
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
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _check_method(getattr(obj, "__name__", ""), owner, (*args, *kwargs.values()))
        return _charged(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise PromptError(_TOO_WIDE)
        return wrapped

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


def _concat(parts: Sequence[Any]) -> str:
    _budget.get().step()
    return "".join(_charged(str(part)) for part in parts)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts as a step, is charged for its result, and takes no enormous widths or separators."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        given = (*args, *kwargs.values())
        if name in _WIDTH_FILTERS:
            _check_widths(given)
        if name == "format" and any(isinstance(arg, str) and _WIDE_FORMAT.search(arg) for arg in given):
            raise PromptError(_TOO_WIDE)
        if name in ("join", "replace", "indent"):
            _charge_product(given)
        return _charged(function(*args, **kwargs))

    return bounded


def _charge_operands(operator: str, left: Any, right: Any) -> None:
    """Charge what an operator is about to make; refuse numbers that grow without end."""
    budget = _budget.get()
    if operator == "%" and isinstance(left, str | bytes):
        if _WIDE_FORMAT.search(str(left)):
            raise PromptError(_TOO_WIDE)
        return
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


def _check_method(name: str, owner: str | bytes | int, given: Sequence[Any]) -> None:
    if name in _WIDTH_METHODS:
        _check_widths(given)
    if name in ("join", "replace"):
        _charge_product((owner, *given))
    if name == "translate":
        raise PromptError("the chat template calls translate, which is not allowed")


def _check_widths(given: Sequence[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > _MAX_WIDTH for arg in given):
        raise PromptError(_TOO_WIDE)


def _charge_product(given: Sequence[Any]) -> None:
    """Charge the two longest arguments' product if one is long: what replacing or joining can make at worst."""
    sizes = sorted(len(arg) for arg in given if isinstance(arg, str | bytes | list | tuple))
    if len(sizes) > 1 and sizes[-2] > _MAX_WIDTH:
        _budget.get().charge(sizes[-1] * sizes[-2])


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
