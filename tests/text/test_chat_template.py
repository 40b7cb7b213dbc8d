import random
from dataclasses import replace

import pytest
from tests.text.rendered import prompt_text
from tests.text.tiny_tokenizers import random_text

from octavo.errors import InvalidRequestError, ModelFileError
from octavo.text.chat_template import ChatTemplate, check_variables

HI = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  What is 1 < 2?\n"},
    {"role": "assistant", "content": "Yes — naïve 猫 🙂"},
    {"role": "user", "content": "{{ not a template }} {% if %}"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object", "properties": {}}},
    }
]
# Each uses something of the dialect: whitespace control, namespaces, loop controls, filters, tests, macros, tags.
TEMPLATES = [
    "{% for m in messages %}\n{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\nA:{% endif %}",
    "{{ bos_token }}{%- for m in messages -%} [{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }}"
    " {{ loop.revindex0 }} {{ loop.cycle('a', 'b') }}"
    " {{ loop.previtem.role if loop.previtem is defined }}] {%- endfor %}",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages if m.role != 'system' %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ m.role ~ ns.n %}{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}{{ ns.text }}",
    "{% if tools %}{{ tools | tojson(indent=2) }}\n{{ tools[0].function | tojson }}{% else %}none{% endif %}",
    "{% macro show(m, pad='-') %}{{ pad * 3 }}{{ m.content | upper | replace('<', '(') }}{% endmacro %}"
    "{% for m in messages[1:] %}{{ show(m) }}{{ show(m, pad='=') }}{% else %}empty{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    " {{ messages[-1].content.split('{')[0] }}|{{ messages[0]['content'].startswith('Be') }}"
    "{{ none }} {{ 1.5 }} {{ [1, 'a'] }}",
    "{{ messages[0].content is string }}{{ messages[0].missing is defined }}{{ messages[0].missing }}"
    "{{ 'x' if custom else 'y' }}"
    "{{ '%s-%02d' % ('a', 7) }}{{ '{}!'.format('b') }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ dict(a=1) }}{{ [1] + [2] }}",
    "{%- set x -%}\n  {{ messages[0].content }}\n{%- endset -%}{{ x | indent(2) }}{{ ('a\nb\n\nc') | indent(4, true) }}"
    "{% filter lower %}ABC{% endfilter %}{{ range(3) | list }}{{ messages | length }}{{ '<é>' | tojson }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for c in 'abc' %}{{ c }}"
    "{% continue %}no{% endfor %}"
    "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    "{% for x in missing %}{% endfor %}",
]


def render(source, messages=HI, **kwargs):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **kwargs)


@pytest.mark.parametrize("source", TEMPLATES, ids=range(len(TEMPLATES)))
def test_equal_to_transformers(source, transformers_tokenizer):
    for messages, tools, prompt in ((CHAT, None, True), (CHAT[:2], TOOLS, False)):
        theirs = transformers_tokenizer.apply_chat_template(
            messages, tools, chat_template=source, add_generation_prompt=prompt, tokenize=False, custom=True
        )
        tokens = {name: str(token) for name, token in transformers_tokenizer.special_tokens_map.items()}
        mine = ChatTemplate(source, tokens).render(messages, prompt, tools, custom=True)
        assert mine == theirs


def test_the_default_models_template_equals_transformers(default_model, transformers_tokenizer):
    """Without calls and results: those are written for it (tool_prompt), since its template knows of none."""
    rng = random.Random(0)
    cases = [CHAT, HI, CHAT[1:], [{"role": "assistant", "content": ""}]]
    cases += [
        [
            {"role": rng.choice(("system", "user", "assistant")), "content": random_text(rng)}
            for _ in range(rng.randint(1, 5))
        ]
        for _ in range(200)
    ]
    for messages in cases:
        for prompt in (True, False):
            text = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert prompt_text(default_model, messages, add_generation_prompt=prompt) == text
            theirs = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
            switched = replace(default_model, special_tokens_in_text=True)
            assert switched.prompt_ids_from_messages(messages, add_generation_prompt=prompt) == theirs
            if default_model.conversation(messages).mark is None:  # no special token is spelled
                assert default_model.prompt_ids_from_messages(messages, add_generation_prompt=prompt) == theirs


def test_continuing_the_final_message_equals_transformers(default_model, transformers_tokenizer):
    trimming = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    for content in ("Yes, ", "Yes", " Yes\n"):
        messages = [*HI, {"role": "assistant", "content": content}]
        for source in (None, trimming):
            theirs = transformers_tokenizer.apply_chat_template(
                messages, chat_template=source, continue_final_message=True, tokenize=False
            )
            model = default_model
            if source is not None:
                model = type(model)(model.name, model.spec, model.tokenizer, ChatTemplate(source, {}))
            assert prompt_text(model, messages, continue_final_message=True) == theirs


DOUBLING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}"
LAUGHS = "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LONG = "{% set x = 'x' * 99999 %}"
EVIL = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.append.__globals__ }}",
    "init": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "namespace": "{% set ns = namespace(_x=1) %}",
    "format-attribute": "{{ '{0.append.__globals__}'.format(messages) }}",
    "attr-filter": "{{ ''|attr('__class__')|attr('__mro__') }}{{ (''|attr('__class__')).x.y }}",
    "mutate": "{{ messages.append(1) }}",
    "mutate-dict": "{{ messages[0].update({'role': 'x'}) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'x' %}",
    "repeat": "{{ 'x' * 10000000000 }}",
    "repeat-list": "{% set x = [0] * 10000000000 %}",
    "power": "{{ 9 ** 99999999 }}",
    "squaring": DOUBLING % ("7", "ns.x * ns.x"),
    "doubling": DOUBLING % ("'x'", "ns.x ~ ns.x"),
    "doubling-plus": DOUBLING % ("'x'", "ns.x + ns.x"),
    "doubling-list": DOUBLING % ("[1]", "ns.x + ns.x"),
    "doubling-percent": DOUBLING % ("'x'", "'%s%s' % (ns.x, ns.x)"),
    "doubling-format": DOUBLING % ("'x'", "'{0}{0}'.format(ns.x)"),
    "doubling-join": DOUBLING % ("'x'", "[ns.x, ns.x]|join"),
    "doubling-set": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% endfor %}",
    "laughs": LAUGHS + "{{ ns.x }}",
    "laughs-json": LAUGHS + "{{ ns.x|tojson }}",
    "laughs-upper": LAUGHS + "{{ ns.x|upper|length }}",
    "laughs-percent": LAUGHS + "{% set y = '%s' % ns.x %}",
    "replace": DOUBLING % ("'x' * 9999", "ns.x.replace('x', ns.x)"),
    "replace-filter": LONG + "{% set y = x|replace('x', x) %}",
    "join": LONG + "{% set y = x.join(x) %}",
    "join-filter": LONG + "{% set y = range(99999)|join(x) %}",
    "join-map": LONG + "{% set y = range(99999)|map('string')|join(x) %}",
    "center": "{{ 'x'.center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(tabsize=1000000000) }}",
    "center-filter": "{{ 'x'|center(10000000000) }}",
    "indent": "{{ 'x\ny'|indent(10000000000) }}",
    "json-indent": "{{ [1]|tojson(indent=10000000000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent-star": "{{ '%*d' % (10000000000, 1) }}",
    "format-width": "{{ '{:10000000000}'.format(1) }}",
    "format-nested": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format-filter": "{{ '%10000000000d'|format(1) }}",
    "strftime": "{{ strftime_now('%10000000000d') }}",
    "slice": "{{ [1]|slice(10000000000)|list }}",
    "range": "{{ range(10000000000)|list }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops-variable": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops-text": "{% for a in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "loops-captured": "{% set x %}{% for a in range(99999) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro-doubling": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive-loop": "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "lipsum": "{{ lipsum(10000000000) }}",
}


@pytest.mark.timeout(30)  # unbounded, each of these would run for hours
@pytest.mark.parametrize("name", EVIL)
def test_row_28_evil_templates_are_refused_in_bounded_time(name):
    with pytest.raises((InvalidRequestError, ModelFileError)) as caught:
        render(EVIL[name], messages=[dict(HI[0])])
    assert "chat template" in str(caught.value)
    assert len(str(caught.value)) < 500
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.param == "messages"


def test_row_28_messages_are_data_and_stay_unchanged():
    messages = [{"role": "user", "content": "{{ ''.__class__ }}{% raise %}"}]
    assert render("{{ messages[0].content }}", messages) == messages[0]["content"]


def test_the_output_limit():
    template = ChatTemplate("{{ messages[0].content }}", {}, max_output_chars=10)
    assert template.render([{"role": "user", "content": "x" * 10}]) == "x" * 10
    with pytest.raises(InvalidRequestError, match="output is too long"):
        template.render([{"role": "user", "content": "x" * 11}])


def test_the_templates_own_refusal_reaches_the_user():
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('Conversation roles must alternate') }}")
    assert caught.value.param == "messages"


def test_messages_that_a_template_cannot_take():
    for messages in ([{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": ["x"]}]):
        with pytest.raises(InvalidRequestError, match="does not take these messages"):
            render("{{ 'a' + messages[0].content + 'b' }}", messages)


def test_variables_reach_the_template():
    with pytest.raises(InvalidRequestError, match="self cannot be set here") as caught:
        check_variables(["self"])
    assert caught.value.param == "chat_template_kwargs"
    assert render("{{ documents }}") == "None" and render("{{ documents[0] }}", documents=["a"]) == "a"
    assert render("{{ bos_token }}{{ thinking }}", thinking=False) == "<s>False"


def test_the_date_is_there():
    assert len(render("{{ strftime_now('%d %b %Y') }}")) == 11


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ x|nofilter }}",
        "x" * (1 << 20),
    ],
)
def test_templates_that_cannot_be_compiled_name_the_file(source):
    with pytest.raises(ModelFileError, match=r"some\.file: chat template"):
        ChatTemplate(source, {}, path="some.file")


def test_a_long_chat_is_no_evil():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(3000)]
    for source in TEMPLATES[:6]:
        assert render(source, messages)
