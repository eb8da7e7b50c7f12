"""Templates get what chat templates need; hostile ones are stopped quickly and with one clear error."""

from __future__ import annotations

import time

import pytest

from outrider.errors import PromptError
from outrider.models import chat_sandbox
from outrider.models.chat_sandbox import render_template, uses_variable


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "{% for m in messages %}\n    {% if loop.first %}\n{{ m }}\n    {% endif %}\n{% endfor %}"
    assert render_template(source, {"messages": ["a", "b"]}) == "a\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}", "12"),
        ("{{ {'b': 'ä<', 'a': 1} | tojson }}", '{"b": "ä<", "a": 1}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% generation %}x{{ 1 }}{% endgeneration %}y", "x1y"),
        ("{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "10"),
        ("{{ 'a' ~ 1 ~ none ~ 'b' }}", "a1Noneb"),
        ("{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "321"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "123"),
        ("{{ ' a '.strip() + 'b,c'.split(',')[1] + ('%s-%d' % ('x', 3)) + '{}:{:>3}'.format(1, 2) }}", "acx-31:  2"),
        ("{{ [1, 2] | map('string') | join(', ') }}{{ 'abc'.replace('b', 'x') | upper }}", "1, 2AXC"),
        ("{{ messages[-1].content[:2] }}", "he"),
        ("{{ not_there }}", ""),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)  # fmt: skip
def test_what_templates_need_works(source: str, expected: str) -> None:
    assert render_template(source, {"messages": [{"content": "hello"}]}) == expected


def test_errors_that_the_template_raises_reach_the_user() -> None:
    with pytest.raises(PromptError, match="refuses this chat: roles must alternate"):
        render_template("{{ raise_exception('roles must alternate') }}", {})


def _grown(start: str, times: int, step: str) -> str:
    """A template that makes its text longer again and again."""
    return (
        "{% set ns = namespace(x="
        + start
        + ") %}{% for i in range("
        + str(times)
        + ") %}"
        + step
        + "{% endfor %}{{ ns.x }}"
    )


HOSTILE = {
    "syntax": "{% for %}",
    "unknown filter": "{{ 1 | nothing }}",
    "undefined attribute": "{{ a.b.c }}",
    "division": "{{ 1 / 0 }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
    "range bomb": "{% for i in range(10 ** 9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop recursion": "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "string product": "{{ 'a' * 10 ** 9 }}",
    "product from the left": "{{ 10 ** 9 * 'a' }}",
    "list product": "{{ ([0] * 10 ** 9) | length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": _grown("3", 60, "{% set ns.x = ns.x * ns.x %}"),
    "doubling by +": _grown("'a'", 60, "{% set ns.x = ns.x + ns.x %}"),
    "doubling by ~": _grown("'a'", 60, "{% set ns.x = ns.x ~ ns.x %}"),
    "doubling by blocks": _grown("'a'", 60, "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "doubling by format": _grown("'a'", 60, "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "doubling by join": _grown("'a'", 60, "{% set ns.x = [ns.x, ns.x] | join %}"),
    "squaring by replace": _grown("'aaaa'", 9, "{% set ns.x = ns.x.replace('a', ns.x) %}"),
    "squaring by filter": _grown("'aaaa'", 9, "{% set ns.x = ns.x | replace('a', ns.x) %}"),
    "many formats of one text": "{% set x = 'a' * 9999999 %}{{ ('{0}' * 9999).format(x) }}",
    "many formats by name": "{% set x = 'a' * 9999999 %}{{ ('%(x)s' * 9999) % {'x': x} }}",
    "format filter": "{% set x = 'a' * 9999999 %}{{ ('%(x)s' * 9999) | format(x=x) }}",
    "format_map": "{% set x = 'a' * 9999999 %}{{ ('{x}' * 9999).format_map({'x': x}) }}",
    "join of one text": "{% set x = 'a' * 9999999 %}{{ ([x] * 9999) | join }}",
    "join of one attribute": "{% set x = {'a': 'a' * 9999999} %}{{ ([x] * 9999) | map(attribute='a') | join(',') }}",
    "join by attribute": "{% set x = {'a': 'a' * 9999999} %}{{ ([x] * 9999) | join(attribute='a') }}",
    "join method": "{% set x = 'a' * 9999999 %}{{ ''.join([x] * 9999) }}",
    "join with a long separator": "{% set x = 'a' * 9999999 %}{{ x.join(['a'] * 9999) }}",
    "replace by a long text": "{{ ('a' * 999999).replace('a', 'b' * 9999) }}",
    "replace nothing": "{{ ('a' * 999999).replace('', 'b' * 9999) }}",
    "expandtabs": "{{ ('\t' * 999999).expandtabs(9999) }}",
    "indented lines": "{{ ('\n' * 999999) | indent(9999, blank=true) }}",
    "wrapped words": "{{ ('a' * 999999) | wordwrap(1, wrapstring='b' * 9999) }}",
    "json of one text": "{% set x = 'a' * 9999999 %}{{ ([x] * 999) | tojson }}",
    "text of one text": "{% set x = 'a' * 9999999 %}{{ ([x] * 999) | string }}",
    "printed list": "{% set x = 'a' * 9999999 %}{{ [x] * 999 }}",
    "concatenated list": "{% set x = 'a' * 9999999 %}{{ 'x' ~ ([x] * 999) }}",
    "printed namespace": "{% set x = 'a' * 9999999 %}{% set ns = namespace(x=[x] * 999) %}{{ ns }}",
    "printed values": "{% set x = 'a' * 9999999 %}{{ {'a': [x] * 999}.values() }}",
    "nested lists": _grown("['a']", 60, "{% set ns.x = [ns.x, ns.x] %}"),
    "upper of a list": "{% set x = 'a' * 9999999 %}{{ ([x] * 999) | upper }}",
    "join method of a generator": "{% set x = {'a': 'a' * 9999999} %}{{ ''.join(([x] * 9999) | map(attribute='a')) }}",
    "sum": "{% set x = ['a'] * 9999 %}{{ ([x] * 99999) | sum(start=[]) | length }}",
    "centre": "{{ 'a' | center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') | length }}",
    "wide %": "{{ '%999999999d' % 1 }}",
    "starred %": "{{ '%*d' % (999999999, 1) }}",
    "starred precision": "{{ '%.*f' % (999999999, 1.0) }}",
    "wide format": "{{ '{:>999999999}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "wide format filter": "{{ '%999999999d' | format(1) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 9) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "round": "{{ 1 | round(10 ** 9, 'ceil') }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 1000}) }}",
    "mapped widths": "{{ range(99999) | map('string') | map('center', 9999) | list | length }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "x" + "{% endif %}" * 500,
    "huge": "x" * (2**20 + 1),
}  # fmt: skip


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__.__init__}'.format(x) }}"])
def test_private_attributes_are_empty(source: str) -> None:
    assert render_template(source, {"x": "text"}) == ""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(PromptError):
        render_template(HOSTILE[name], {"messages": [{"role": "user", "content": "x"}]})
    assert time.monotonic() - start < 5


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_CHARACTERS", 1000)
    assert len(render_template("{% for i in range(900) %}a{% endfor %}", {})) == 900
    with pytest.raises(PromptError, match="more than 1000 characters"):
        render_template("{% for i in range(1100) %}a{% endfor %}", {})


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(PromptError, match="longer than"):
        render_template("{% for i in range(9999) %}{% endfor %}", {})


def test_a_long_chat_is_far_from_the_bounds() -> None:
    chat = [{"role": "user", "content": "word " * 400} for _ in range(2000)]
    source = "{% for m in messages %}{{ '<' + m['role'] + '>' + (m['content'] | trim) + '\\n' }}{% endfor %}"
    assert len(render_template(source, {"messages": chat})) > 2_000_000


def test_budget_is_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_CHARACTERS", 1000)
    for _ in range(5):
        render_template("{% for i in range(900) %}a{% endfor %}", {})


def test_variables_are_found_where_they_are_read() -> None:
    assert uses_variable("{% if tools is defined %}x{% endif %}", "tools")
    assert uses_variable("{% macro f() %}{{ tools }}{% endmacro %}", "tools")
    assert not uses_variable("{# tools #} tools {{ 'tools' }} {% set tools = 1 %}{{ tools }}", "tools")
    with pytest.raises(PromptError, match="broken"):
        uses_variable("{% for %}", "tools")
