"""Single features of Jinja as chat templates use them, rendered by transformers.

Writes tests/golden/text/jinja.json: rows of [template, output], or [template, null, "raised" | "error", message] where
transformers fails (message: of raise_exception only).
Left out: what Python refuses by type (`none > 1`, `for x in none`, `1 in 'abc'`), where lmx is lenient.
"""

import json
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

CONTEXT = {
    "messages": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "What's 1 < 2 & \"3\" > '2'?\n"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": [True, None, 2.5], "c": {"d": "é\u2028</x>\t\u0001"}}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d<e>", "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": ["integer", "null"], "minimum": 0.5, "maximum": 1e20, "default": -0.0}}, "required": ["z"]}}}],
    "empty": "", "zero": 0, "one": 1, "half": 0.5, "big": 123456789012345678, "tiny": 1.5e-7, "huge": 1e22, "whole": 3.0, "neg": -7,
    "yes": True, "no": False, "none": None, "text": "Hello World", "spaced": "  a b\tc\n\n d ", "lines": "one\ntwo\r\nthree\n", "uni": "ÄÖü ß 日本 é",
    "list": [3, 1, 2], "words": ["b", "a", "C", "a"], "pairs": [["k", 1], ["l", 2]], "mixed": [1, "a", None, True, 2.0, [1], {"q": "it's"}], "none_list": [],
    "info": {"b": 1, "a": {"n": [1, 2]}, "C": "x"}, "objs": [{"n": "x", "v": 2, "on": True}, {"n": "y", "v": 1, "on": False}, {"n": "z", "v": 1}],
    "html": "<b>&\"'</b>", "num_text": "42", "float_text": "3.7", "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True,
}

SNIPPETS = r"""
{{ none }}|{{ yes }}|{{ no }}|{{ one }}|{{ half }}|{{ whole }}|{{ big }}|{{ neg }}
{{ tiny }}|{{ huge }}|{{ 1e16 }}|{{ 123456.789 }}|{{ 1e15 }}|{{ 0.1 + 0.2 }}
{{ list }}|{{ words }}|{{ mixed }}|{{ info }}|{{ [1e20, 1e-7, 'a\u2028\x07'] }}|{{ tools }}|{{ none_list }}|{{ {} }}
{{ (1, 2) }}|{{ (1,) }}|{{ () }}|{{ [none, yes] }}
{{ ["it's", 'say "x"', "a\nb\\c"] }}
{{ text ~ 1 ~ none ~ yes ~ 1.0 ~ [1,'a'] }}
{{ 'a' + 'b' }}|{{ 'a' * 3 }}|{{ [1] + [2] }}|{{ [1, 2] * 2 }}
{{ 'a' + 1 }}
{{ 'a' + none }}
{{ none + 'a' }}
{{ undefined_name }}|{{ undefined_name is defined }}|{{ undefined_name or 'x' }}
{{ undefined_name.attr }}
{{ undefined_name + 'a' }}
{{ undefined_name ~ 'a' }}
{{ undefined_name | length }}
{% for x in undefined_name %}x{% else %}none{% endfor %}
{{ 'a' in undefined_name }}
{{ messages[0].foo }}|{{ messages[0].foo is defined }}|{{ messages[0]['foo'] is none }}
{{ messages[0].foo.bar }}
{{ messages[9] is defined }}|{{ messages[9] }}|{{ messages[-1].role }}|{{ messages[-9] is defined }}
{{ none.attr is defined }}
{{ none.attr }}
{{ text.attr }}|{{ text[0] }}|{{ text[-1] }}|{{ text[99] is defined }}
{{ text[1:4] }}|{{ text[:-1] }}|{{ text[::2] }}|{{ text[::-1] }}|{{ text[3:1] }}|{{ text[-3:] }}|{{ uni[1:3] }}
{{ list[1:] }}|{{ list[::-1] }}|{{ list[:0] }}|{{ messages[1:] | length }}|{{ list[-2:] }}|{{ list[5:] }}
{{ 7 // 2 }}|{{ -7 // 2 }}|{{ 7 % 3 }}|{{ -7 % 3 }}|{{ 7 / 2 }}|{{ 4 / 2 }}|{{ 2 ** 10 }}|{{ 2 ** -1 }}|{{ 7.5 // 2 }}
{{ 1 / 0 }}
{{ 1 < 2 }}|{{ 'a' < 'b' }}|{{ 1 == 1.0 }}|{{ 1 == true }}|{{ '1' == 1 }}|{{ none == false }}|{{ [1] == [1] }}|{{ {'a':1} == {'a':1} }}
{{ 1 < 2 < 3 }}|{{ 3 > 2 > 2 }}|{{ 1 == 1 == 1 }}
{{ not none }}|{{ not '' }}|{{ not [] }}|{{ not {} }}|{{ not 0 }}|{{ not 0.0 }}|{{ not 'x' }}
{{ '' or 'd' }}|{{ 0 and 1 }}|{{ none or none }}|{{ 'a' and 'b' }}|{{ [] or {} }}
{{ 'ell' in text }}|{{ 'z' not in text }}|{{ 1 in list }}|{{ 'a' in info }}|{{ '' in text }}|{{ 'q' in mixed }}
{{ 'x' if yes else 'y' }}|{{ 'x' if no }}|{{ ('x' if no) is defined }}
{{ yes | string }}|{{ none | string }}|{{ 1.0 | string }}|{{ [1, 'a'] | string }}|{{ info | string }}
{{ yes is true }}|{{ 1 is true }}|{{ no is false }}|{{ 0 is false }}|{{ none is none }}|{{ '' is none }}
{{ text is string }}|{{ 1 is string }}|{{ list is string }}|{{ none is string }}|{{ undefined_name is string }}
{{ info is mapping }}|{{ list is mapping }}|{{ text is mapping }}|{{ none is mapping }}
{{ list is sequence }}|{{ text is sequence }}|{{ info is sequence }}|{{ 1 is sequence }}|{{ none is sequence }}|{{ (1,2) is sequence }}
{{ list is iterable }}|{{ text is iterable }}|{{ info is iterable }}|{{ 1 is iterable }}|{{ none is iterable }}|{{ undefined_name is iterable }}
{{ 1 is number }}|{{ 1.5 is number }}|{{ yes is number }}|{{ '1' is number }}|{{ none is number }}
{{ 1 is integer }}|{{ 1.0 is integer }}|{{ yes is integer }}|{{ 1 is float }}|{{ 1.0 is float }}|{{ yes is boolean }}|{{ 1 is boolean }}
{{ 3 is odd }}|{{ 4 is even }}|{{ 9 is divisibleby 3 }}|{{ 9 is divisibleby(2) }}
{{ 1 is eq 1 }}|{{ 1 is equalto 1 }}|{{ 1 is ne 2 }}|{{ 1 is lt 2 }}|{{ 2 is gt 1 }}|{{ 1 is le 1 }}|{{ 1 is in list }}|{{ 'x' is in 'xyz' }}
{{ 1 is == 1 }}
{{ 'abc' is lower }}|{{ 'ABC' is upper }}|{{ none is sameas none }}|{{ 1 is sameas 1 }}|{{ text is callable }}|{{ range is callable }}
{{ 'trim' is filter }}|{{ 'odd' is test }}|{{ 'nix' is filter }}
{{ text is not defined }}|{{ nope is not defined }}|{{ not nope is defined }}
{{ spaced | trim }}|{{ 'xxaxx' | trim('x') }}|{{ spaced.strip() }}|{{ spaced.lstrip() }}|{{ spaced.rstrip() }}
{{ 'xyaxy'.strip('xy') }}|{{ 'abc'.lstrip('ab') }}|{{ 'abc'.rstrip('c') }}|{{ '\x1c a\x85'.strip() }}
{{ text | upper }}|{{ text | lower }}|{{ 'hELLO wORLD' | capitalize }}|{{ "it's a tEST-case x" | title }}|{{ 'ß'.upper() }}
{{ text.upper() }}|{{ text.lower() }}|{{ 'hELLO'.capitalize() }}|{{ "they're bill's x1y" .title() }}|{{ text.swapcase() }}
{{ text | replace('l', 'L') }}|{{ text | replace('l', 'L', 1) }}|{{ text.replace('o', '0') }}|{{ text.replace('o', '0', 1) }}|{{ 'aaa'.replace('', '-') }}
{{ text.split() }}|{{ spaced.split() }}|{{ 'a,b,,c'.split(',') }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a b'.split(' ')[-1] }}|{{ ''.split(',') }}|{{ ''.split() }}
{{ 'a,b,c'.rsplit(',', 1) }}|{{ 'a.b'.partition('.') }}|{{ 'ab'.partition('.') }}|{{ 'a.b.c'.rpartition('.') }}
{{ 'a--b'.split('--')[0] }}|{{ '</think>x'.split('</think>')[-1].lstrip('\n') }}|{{ 'a'.split('</think>') | length }}
{{ lines.splitlines() }}|{{ lines.splitlines(True) }}|{{ 'a\x0bb\u2028c'.splitlines() }}
{{ text.startswith('He') }}|{{ text.endswith('ld') }}|{{ text.startswith(('x', 'H')) }}|{{ text.endswith(('x',)) }}
{{ text.find('o') }}|{{ text.find('z') }}|{{ text.rfind('o') }}|{{ text.index('o') }}|{{ text.count('l') }}|{{ uni.find('日') }}
{{ text.index('z') }}
{{ '12'.isdigit() }}|{{ ''.isdigit() }}|{{ '²'.isdigit() }}|{{ 'a1'.isalnum() }}|{{ 'ab'.isalpha() }}|{{ ' '.isspace() }}|{{ 'aB'.islower() }}|{{ 'AB'.isupper() }}|{{ '½'.isnumeric() }}|{{ '12'.isdecimal() }}
{{ 'prefix-x'.removeprefix('prefix-') }}|{{ 'x.txt'.removesuffix('.txt') }}|{{ '7'.zfill(3) }}|{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '-') }}|{{ 'a'.center(5, '*') }}
{{ ', '.join(['a', 'b']) }}|{{ ''.join(words) }}|{{ '-'.join('abc') }}
{{ '{} and {}'.format('a', 1) }}|{{ '{0}{1}{0}'.format('a', 'b') }}|{{ '{x}'.format(x=3) }}|{{ '{:>4}|{:.2f}'.format('a', 2.5) }}
{{ '%s-%s' | format('a', 'b') }}|{{ '%.2f' | format(2.345) }}|{{ '%05d' | format(42) }}
{{ list | length }}|{{ text | length }}|{{ info | length }}|{{ uni | length }}|{{ text | count }}|{{ '👩‍🚀' | length }}
{{ list | first }}|{{ list | last }}|{{ text | first }}|{{ none_list | first }}|{{ text | last }}
{{ list | join(', ') }}|{{ words | join }}|{{ objs | join(',', attribute='n') }}|{{ 'abc' | join('-') }}|{{ mixed | join(' ') }}
{{ list | sort }}|{{ words | sort }}|{{ words | sort(case_sensitive=true) }}|{{ list | sort(reverse=true) }}|{{ objs | sort(attribute='v') | map(attribute='n') | join }}
{{ list | reverse | list }}|{{ text | reverse }}|{{ words | unique | list }}|{{ [1,1,2] | unique | list }}
{{ list | sum }}|{{ list | min }}|{{ list | max }}|{{ objs | sum(attribute='v') }}|{{ none_list | max }}
{{ objs | map(attribute='n') | list }}|{{ words | map('upper') | list }}|{{ objs | map(attribute='on', default='?') | list }}|{{ pairs | map('first') | join }}
{{ objs | selectattr('on') | map(attribute='n') | list }}|{{ objs | selectattr('on', 'defined') | list | length }}|{{ objs | selectattr('v', 'equalto', 1) | map(attribute='n') | list }}|{{ objs | rejectattr('on') | map(attribute='n') | list }}
{{ objs | selectattr('v', '==', 1) | list | length }}|{{ objs | selectattr('n', 'in', ['x', 'z']) | map(attribute='v') | list }}
{{ list | select('odd') | list }}|{{ list | reject('odd') | list }}|{{ mixed | select | list }}|{{ list | select('greaterthan', 1) | list }}|{{ mixed | select('string') | list }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|{{ (messages | selectattr('role', 'eq', 'user') | first).content }}
{{ objs | groupby('v') | map('first') | list }}
{% for v, items in objs | groupby('v') %}{{ v }}:{% for i in items %}{{ i.n }}{% endfor %};{% endfor %}
{% for k, v in info | dictsort %}{{ k }}={{ v }};{% endfor %}|{% for k, v in info | dictsort(reverse=true) %}{{ k }};{% endfor %}
{% for k, v in {'a': 2, 'b': 1} | dictsort(by='value') %}{{ k }}{% endfor %}
{% for k in info %}{{ k }}{% endfor %}|{% for k, v in info.items() %}{{ k }}={{ v }};{% endfor %}|{% for k, v in info | items %}{{ k }}{% endfor %}|{{ info.keys() | list }}|{{ info.values() | list }}
{{ info.get('b') }}|{{ info.get('zz') }}|{{ info.get('zz', 'd') }}|{{ info['b'] }}|{{ info.b }}|{{ info.a.n[1] }}|{{ info.items() | list }}
{{ info | list }}|{{ text | list | length }}|{{ dict(a=1, b='x') }}|{{ info | tojson }}
{{ range(3) | list }}|{{ range(1, 7, 2) | list }}|{{ range(3, 0, -1) | list }}|{{ range(0) | list }}
{{ list | batch(2) | list }}|{{ list | batch(2, 'x') | list }}|{{ [1,2,3,4,5] | slice(2) | list }}
{{ none | default('d') }}|{{ nope | default('d') }}|{{ '' | default('d', true) }}|{{ '' | d('x') }}|{{ no | default('d', boolean=true) }}|{{ nope | default }}
{{ num_text | int + 1 }}|{{ 'x' | int }}|{{ 'x' | int(7) }}|{{ 3.9 | int }}|{{ float_text | float }}|{{ 'x' | float }}|{{ '0x1f' | int(0, 16) }}
{{ neg | abs }}|{{ 2.567 | round }}|{{ 2.567 | round(2) }}|{{ 2.5 | round }}|{{ 3.5 | round }}|{{ 2.1 | round(0, 'ceil') }}|{{ 2.9 | round(method='floor') }}|{{ 7 | round }}
{{ html | e }}|{{ html | escape }}|{{ html | safe }}|{{ html | forceescape }}
{{ lines | indent(2) }}|{{ lines | indent(2, true) }}|{{ 'a\n\nb' | indent(2, blank=true) }}|{{ 'a\nb' | indent(width='>>') }}|{{ 'a\nb' | indent }}
{{ tools | tojson }}
{{ tools | tojson(indent=2) }}
{{ tools[0] | tojson(indent=4) }}
{{ info | tojson(separators=(',', ':')) }}|{{ info | tojson(sort_keys=true) }}|{{ uni | tojson(ensure_ascii=true) }}|{{ uni | tojson(ensure_ascii=False) }}|{{ info | tojson(indent=1, separators=(',', ':'), sort_keys=True) }}
{{ [] | tojson(indent=2) }}|{{ {} | tojson(indent=2) }}|{{ [[], {}] | tojson(indent=2) }}|{{ [1, [2]] | tojson(indent='--') }}|{{ [1] | tojson(indent=0) }}
{{ messages[2].tool_calls[0].function.arguments | tojson }}|{{ messages[1].content | tojson }}
{{ tiny | tojson }}|{{ huge | tojson }}|{{ whole | tojson }}|{{ 1e16 | tojson }}|{{ none | tojson }}|{{ yes | tojson }}|{{ 'a"b\\/' | tojson }}|{{ "\x7f\u2028😀" | tojson }}|{{ "😀\u00e9" | tojson(ensure_ascii=true) }}
{{ undefined_name | tojson }}
{{ {'a': 1, 2: 'b', none: 3, yes: 4} | tojson }}|{{ (1, 2) | tojson }}|{{ range(2) | list | tojson }}
{{ raise_exception('boom ' ~ one) }}
{% if messages[0].role == 'system' %}{{ raise_exception("No system!") }}{% endif %}
{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.found = true %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.found }} {{ ns.n }}
{% set x = 1 %}{% for i in list %}{% set x = x + i %}{% endfor %}{{ x }}
{% set x = 1 %}{% if yes %}{% set x = 2 %}{% endif %}{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}|{% set c = 'x', 'y' %}{{ c }}
{% set block %}  inner {{ text }}{% endset %}[{{ block }}]|{% set up | upper %}abc{% endset %}{{ up }}
{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}
{% for i in list %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }};{% endfor %}
{% for i in list %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i) }}{{ loop.depth }};{% endfor %}
{% for i in list if i > 1 %}{{ loop.index }}:{{ i }}/{{ loop.length }};{% endfor %}|{% for i in [] %}x{% else %}empty{% endfor %}
{% for i in list %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}|{% for i in list %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for k, v in pairs %}{{ k }}{{ v }}{% endfor %}|{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for m in messages %}{% for n in messages %}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}
{% for m in messages %}{% set outer = loop %}{% for n in [1] %}{{ outer.index }}{% endfor %}{% endfor %}
{% for item in [{'c': [{'c': []}]}] recursive %}<{{ loop.depth }}{{ loop(item.c) }}>{% endfor %}
{% for m in messages[::-1] %}{{ m.role }},{% endfor %}|{% for m in messages | reverse %}{{ m.role[0] }}{% endfor %}
{% macro m(a, b='d', c=none) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(a=1, c=3) }}
{% macro m(a) %}<{{ caller() }}{{ a }}>{% endmacro %}{% call m(1) %}body{% endcall %}
{% macro m(a) %}{{ undefined_in_macro }}{{ text }}{% endmacro %}{{ m(1) }}
{% macro rec(n) %}{% if n > 0 %}{{ n }}{{ rec(n - 1) }}{% endif %}{% endmacro %}{{ rec(3) }}
{% macro m() %}  x  {% endmacro %}{{ m() | trim }}|{{ m().strip() }}|{% set y = m() %}{{ y | length }}
{% filter upper %}abc{{ text }}{% endfilter %}|{% with x = 5 %}{{ x }}{% endwith %}{{ x is defined }}
{% raw %}{{ not }} {% jinja %}{% endraw %}|{# comment #}x{# multi
line #}y
{% if one == 2 %}a{% elif one == 1 %}b{% else %}c{% endif %}
  {% if yes %}  x  {% endif %}  y
a  {%- if yes -%}  x  {%- endif -%}  y
a {{- ' b ' -}} c|{{ 'x' -}}   y
x{% if yes %}
y{% endif %}
z
  {# c #}
x
  {%+ if yes %}a{% endif +%}
b
{{ "a\tb\nc\\d\"e\u00e9\x41" }}|{{ 'it''s' }}|{{ 'a' 'b' }}
{{ 1_000 }}|{{ 0x1f }}|{{ 0b101 }}|{{ 0o17 }}|{{ 1.5e3 }}
{{ {'a': 1}.a }}|{{ {'a': 1}['a'] }}|{{ [1,2][0] }}|{{ 'abc'[1] }}|{{ {'items': 5}['items'] }}
{{ [1, 2, 3,] }}|{{ {'a': 1,} }}|{{ (1, 2, 3)[1] }}|{{ (1 + 2) * 3 }}
{{ (messages | length) - 1 }}|{{ not yes and no }}|{{ -list[0] }}|{{ -1 ** 2 }}|{{ 2 ** 3 ** 2 }}|{{ 'a' ~ 1 + 2 }}
{{ text | upper | lower | length }}|{{ 'a' | upper ~ 'b' | upper }}|{{ (text | upper)[0] }}|{{ text | replace('H', 'J') | upper }}
{{ messages[0]['content'] | trim + eos_token }}|{{ '<|' + messages[0].role + '|>' }}|{{ bos_token + 'x' }}
{{ messages | map(attribute='role') | join(',') }}|{{ messages | map(attribute='content') | list | length }}
{% for m in messages %}{% if m.content is string %}s{% elif m.content is none %}n{% elif m.content is iterable %}i{% endif %}{% endfor %}
{% for m in messages %}{% if m.tool_calls %}T{% endif %}{% if 'tool_calls' in m %}t{% endif %}{% if m.tool_calls is defined and m.tool_calls is not none %}d{% endif %}{% endfor %}
{% for c in messages[3].content %}{% if c.type == 'text' %}{{ c.text }}{% else %}<{{ c['type'] }}>{% endif %}{% endfor %}|{{ messages[3].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('+') }}
{% set system = messages[0].content if messages[0].role == 'system' else '' %}{{ system.strip() }}|{% set rest = messages[1:] %}{{ rest[0].role }}
{{ messages[2].tool_calls[0].function.arguments.items() | list | length }}|{% for k, v in messages[2].tool_calls[0].function.arguments | items %}{{ k }}={{ v | tojson if v is not string else v }};{% endfor %}
{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k ~ '=' ~ v | string }};{% endfor %}
{{ joiner is defined }}|{% set j = joiner(', ') %}{{ j() }}a{{ j() }}b|{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}
{{ text.__class__ }}
{{ [].append(1) }}
{% set l = [] %}{% set _ = l.append(1) %}{{ l }}
{% set d = {} %}{% set _ = d.update({'a': 1}) %}{{ d }}
{{ 5 is none or 3 }}|{{ (5 is none) or 3 }}
{{ nope.x is defined }}
{{ undefined_name | upper }}|{{ 1 | upper }}|{{ none | lower }}|{{ [1, 'a'] | upper }}|{{ yes | capitalize }}|{{ none | title }}
{{ undefined_name | replace('a', 'b') }}|{{ none | replace('N', 'n') }}|{{ 12 | replace('1', 'x') }}|{{ list | trim }}|{{ undefined_name | trim }}|{{ none | trim }}
{{ undefined_name | join }}|{{ undefined_name | list }}|{{ undefined_name | first }}|{{ none | int }}|{{ undefined_name | length }}|{{ undefined_name | string }}
{{ undefined_name | map(attribute='x') | list }}|{{ undefined_name | selectattr('x') | list }}|{{ undefined_name | sort }}|{{ undefined_name | reverse | list }}|{{ undefined_name | unique | list }}
{{ none | length }}
{{ none | first }}
{{ 5 | first }}
{{ 'a' in none }}
{{ 'a' in 5 }}
{{ messages.foo is defined }}|{{ text.foo is defined }}|{{ (5).foo is defined }}|{{ info[none] is defined }}|{{ list['a'] is defined }}
{{ [1, 2] == (1, 2) }}|{{ 'a' == none }}|{{ undefined_name == none }}|{{ undefined_name == '' }}|{{ undefined_name != 'x' }}|{{ undefined_name is none }}
{{ list > [1] }}|{{ 'abc' < 'abd' }}|{{ (1, 2) < (1, 3) }}
{{ {'a': none}.a is none }}|{{ {'a': none}.a is defined }}|{{ {'a': none}.get('a', 1) }}
{{ text[none:] }}|{{ text[1:none] }}|{{ list[none] is defined }}
{{ (1, 2) + (3,) }}|{{ [1] + (2,) is defined }}
{{ 3 | string ~ 4 }}|{{ -5 // 3 }}|{{ -5 % 3 }}|{{ 5 % -3 }}|{{ 5.5 % 2 }}|{{ 1e300 * 1e10 }}|{{ 10 ** 20 }}|{{ 2 ** 0.5 }}
{{ text | nofilter }}
{{ text is notest }}
{{ nofunction() }}
{{ text.nomethod() }}
{% for i in 5 %}{% endfor %}
{{ list | join(',' }}
{% if %}{% endif %}
{% endfor %}
{% unknown_tag %}
{% generation %}a{% endgeneration %}|{%- generation -%} b {%- endgeneration -%}|
{% generation %}
x{% set inner = 1 %}
{% endgeneration %}
{{ inner is defined }}
{{ strftime_now('%%') }}|{{ strftime_now('%Y') | length }}|{{ strftime_now('%d %b %Y') | length }}
{% do list %}
{% include 'x' %}
{% block a %}in{% endblock %}
{{ loop is defined }}|{{ namespace(a=1).a }}
{% set ns = namespace() %}{% set ns.x = [1] %}{% set ns.x = ns.x + [2] %}{{ ns.x }}|{{ ns.y is defined }}|{{ ns.y }}
{% set t = 'a' %}{% set t = t ~ 'b' %}{{ t }}|{% set x = none %}{{ x is none }}|{{ x | default('d', true) }}
{{ true }}|{{ True }}|{{ false }}|{{ False }}|{{ none }}|{{ None }}
{{ 'a' if 1 else 'b' if 0 else 'c' }}|{{ ('a' if 0 else 'b') + 'c' }}|{{ 'x' if nope is defined and nope else 'y' }}
{{ messages[0].content[:4] + '...' }}|{{ text[0] | upper }}{{ text[1:] }}|{{ text.split(' ')[1][0] }}
{{ [text, none, 1] | map('string') | join('/') }}|{{ list | map('string') | list }}|{{ ['a'] | map('replace', 'a', 'b') | list }}
{{ info.items() | map('first') | list }}|{{ info | dictsort | first }}|{{ info | length > 2 }}|{{ info.a | length }}
{{ {'a': 1} | combine }}
{{ 10 | string | length }}|{{ text | string == text }}|{{ 1 | string + 'x' }}
{{ list is defined and list | length > 0 }}|{{ list and list[0] }}|{{ (list | first) + 1 }}|{{ one + half }}|{{ yes + 1 }}|{{ 3 * half }}
{%- for m in messages -%}
    {%- if loop.first -%}
        {{- bos_token -}}
    {%- endif -%}
    {{- '<' + m['role'] + '>' -}}
{%- endfor -%}
"""


# What lmx does not have: these must be errors there, not other text.
UNSUPPORTED = [
    "{{ '%s' % 'x' }}", "{{ 'a b' | wordcount }}", "{{ 'abcdef' | truncate(3) }}", "{{ 'a b c' | wordwrap(3) }}", "{{ text | urlencode }}",
    "{{ 1500 | filesizeformat }}", "{{ {'a': 'b'} | xmlattr }}", "{{ html | striptags }}", "{{ 'a' | center(5) }}",
    "{% macro m(a) %}{{ varargs }}{% endmacro %}{{ m(1, 2) }}", "{{ lipsum() }}",
]


def blocks():
    """One snippet a line; lines that a tag left open, or that begin a known multi-line case, go together."""
    multi = ["x{% if yes %}\ny{% endif %}\nz", "  {# c #}\nx", "  {%+ if yes %}a{% endif +%}\nb", "{% raw %}{{ not }} {% jinja %}{% endraw %}|{# comment #}x{# multi\nline #}y",
             "{% generation %}\nx{% set inner = 1 %}\n{% endgeneration %}\n{{ inner is defined }}"]
    text = SNIPPETS.strip("\n")
    tail = text[text.index("{%- for m in messages -%}"):]
    text = text.removesuffix(tail)
    for m in multi:
        assert m in text, m
        text = text.replace(m + "\n", "")
    return [line for line in text.split("\n") if line] + multi + [tail, "line\n", "line\n\n", "\n\nline", "{{ text }}\n", "{% if yes %}\na\n{% endif %}\n", "\r\nx\r\n{% if yes %}\r\ny\r\n{% endif %}\r\nz"]


def render(snippet):
    rest = {k: v for k, v in CONTEXT.items() if k != "messages"}
    chats = [_normalize_chat_messages(CONTEXT["messages"])]
    return render_jinja_template(chats, chat_template=snippet, enable_thinking=False, **rest)[0][0]


def main():
    rows = []
    for snippet in blocks():
        try:
            rows.append([snippet, render(snippet)])
        except jinja2.exceptions.TemplateError as e:
            kind = "raised" if type(e) is jinja2.exceptions.TemplateError else "error"
            rows.append([snippet, None, kind, str(e) if kind == "raised" else type(e).__name__])
        except Exception as e:
            rows.append([snippet, None, "error", type(e).__name__])
    out = Path(__file__).parent.parent / "golden" / "text" / "jinja.json"
    body = ",\n".join(json.dumps(row) for row in rows)
    out.write_text('{"context": ' + json.dumps(CONTEXT) + ',\n"rows": [\n' + body + '\n],\n"unsupported": ' + json.dumps(UNSUPPORTED) + "}\n")
    print(len(rows), sum(r[1] is None for r in rows))


if __name__ == "__main__":
    main()
