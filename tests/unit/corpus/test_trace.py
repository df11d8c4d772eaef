"""What a traced rendering concludes, and that it concludes nothing where a template does what it does not follow."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from drafthouse.corpus.trace import Change, Question, Trace, TracedTemplate, UntraceableError, WatchedObject, apply


def traced(source: str, content: str, arguments: dict[str, Any] | None = None) -> tuple[list[str | int], Trace]:
    template = TracedTemplate(source)
    values: list[Any] = [content, arguments or {}]
    trace = Trace(values, template.to_json)
    message = {"role": "user", "content": trace.text(Change(0)), "arguments": WatchedObject(trace, 1)}
    return template.pieces(trace, [message]), trace


def printed(source: str, content: str, arguments: dict[str, Any] | None = None) -> str:
    pieces, trace = traced(source, content, arguments)
    return "".join(
        one if isinstance(one, str) else apply(trace.changes[one], trace.values, trace.to_json) for one in pieces
    )


FOLLOWED = {
    "{{ messages[0].content }}!": "  hi <b> !",
    "{{ '<' + messages[0].content + '>' }}": "<  hi <b> >",
    "{{ '<' ~ messages[0].content ~ 1 }}": "<  hi <b> 1",
    "{{ messages[0].content | trim }}": "hi <b>",
    "{{ messages[0].content | default('x') }}": "  hi <b> ",
    "{{ messages[0].content | default('x', true) }}": "  hi <b> ",
    "{{ messages[0].content | default('x', boolean=true) }}": "  hi <b> ",
    "{{ messages[0].content.lstrip() }}|{{ messages[0].content.rstrip(' ') }}": "hi <b> |  hi <b>",
    "{{ messages[0].content | trim | tojson }}": '"hi <b>"',
    "{{ messages[0].arguments | tojson }}": '{"x": "ü"}',
    "{{ messages[0].arguments | tojson(indent=1) }}": '{\n "x": "ü"\n}',
    "{% if '<b>' in messages[0].content %}yes{% endif %}": "yes",
    "{% if messages[0].content.startswith('  hi') %}yes{% endif %}": "yes",
    "{% if messages[0].content == '  hi <b> ' %}yes{% endif %}": "yes",
    "{% if messages[0].content %}yes{% endif %}": "yes",
    "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}": "  hi <b> ",
    "{% if messages[0].arguments is mapping and messages[0].arguments %}yes{% endif %}": "yes",
    "{% macro m(t) %}{{ t }}{% endmacro %}{{ m(messages[0].content) | trim }}": "hi <b>",
    "{% set x %}{{ messages[0].content }}{% endset %}{{ x }}": "  hi <b> ",
    "{% set ns = namespace(t='') %}{% set ns.t = messages[0].content %}{{ ns.t }}": "  hi <b> ",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
    "{% for m in messages[::-1] %}{{ ''.strip('x') ~ m.content }}{% endfor %}": "  hi <b> ",
}
NOT_FOLLOWED = [
    "{{ messages[0].content | upper }}",
    "{{ messages[0].content | length }}",
    "{{ messages[0].content[0] }}",
    "{{ messages[0].content[:2] }}",
    "{{ messages[0].content.split('<')[0] }}",
    "{{ messages[0].content.replace('h', 'x') }}",
    "{{ messages[0].content | replace('h', 'x') }}",
    "{{ 'abc'.replace('b', messages[0].content) }}",
    "{{ '%s' % messages[0].content }}",
    "{{ '%s' | format(messages[0].content) }}",
    "{{ '{}'.format(messages[0].content) }}",
    "{{ messages[0].content * 2 }}",
    "{{ [messages[0].content] | join(',') }}",
    "{{ ['a', 'b'] | join(d=messages[0].content) }}",
    "{{ messages[0] | tojson }}",
    "{{ {'a': messages[0].content} | tojson }}",
    "{{ messages[0].arguments.x }}",
    "{{ messages[0].arguments | length }}",
    "{% for k, v in messages[0].arguments.items() %}{{ k }}{% endfor %}",
    "{% for c in messages[0].content %}{{ c }}{% endfor %}",
    "{% if messages[0].content < 'x' %}a{% endif %}",
    "{% if ('a' ~ messages[0].content) == 'ahi' %}a{% endif %}",
    "{% if 'a' in ('b' ~ messages[0].content) %}a{% endif %}",
    "{{ {'hi': 1}[messages[0].content] }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("source", FOLLOWED)
def test_what_is_followed_prints_what_jinja_prints(source: str) -> None:
    content, arguments = "  hi <b> ", {"x": "ü"}
    assert printed(source, content, arguments) == FOLLOWED[source]


@pytest.mark.parametrize("source", NOT_FOLLOWED)
def test_what_is_not_followed_is_refused_and_not_guessed(source: str) -> None:
    with pytest.raises((UntraceableError, jinja2.TemplateError)) as caught:
        printed(source, "hi")
    assert not isinstance(caught.value, jinja2.TemplateSyntaxError)


def test_every_question_is_kept_with_its_answer() -> None:
    source = "{% if 'b' in messages[0].content | trim and not messages[0].content.endswith('x') %}a{% endif %}"
    _, trace = traced(source, " b ")
    assert [(one.kind, one.argument, one.answer) for one in trace.questions] == [
        ("contains", "b", True),
        ("endswith", "x", False),
    ]
    (inside, ends) = trace.questions
    assert trace.changes[inside.about] == Change(0, (("strip", (), ()),))
    assert trace.changes[ends.about] == Change(0)


def test_a_question_asked_twice_is_kept_once() -> None:
    _, trace = traced("{% if messages[0].content %}{% endif %}{% if messages[0].content %}{% endif %}", "x")
    assert list(trace.questions) == [Question(0, "bool", None, True)]


def test_the_default_of_an_empty_text() -> None:
    assert printed("{{ messages[0].content | default('x', true) }}", "") == "x"
    assert printed("{{ messages[0].content | default('x') }}", "") == ""


def test_a_refusal_of_the_template_stays_one() -> None:
    with pytest.raises(jinja2.TemplateError, match="never"):
        printed("{{ raise_exception('never') }}", "x")
