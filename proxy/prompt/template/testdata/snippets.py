"""Writes snippets.json.gz: small templates over what chat templates use, and
what Python's Jinja makes of them, set up as transformers sets it up.

    python3 snippets.py               needs jinja2 3.1.6; the results were made by Python 3.11
    python3 snippets.py N SEED FILE   the same of N random templates, for INFERRAIL_SNIPPETS=FILE
"""

import copy
import gzip
import json
import os
import random
import sys
import warnings
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime(2026, 7, 4, 9, 5, 3)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_run"), [], [], body).set_lineno(line)

    def _run(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment(renders=True):
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    if renders:
        env.filters["tojson"] = tojson
        env.globals["raise_exception"] = raise_exception
        env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


VARS = {
    "s": "Hello, World",
    "empty": "",
    "sp": "  two  words \n",
    "uni": "Grüße, 世界! 🙂 é\u0301",
    "lines": "one\ntwo\r\nthree\rfour\x0bfive\u2028six\n",
    "quote": "it's \"quoted\" \\ back\tslash\u00a0\u200b\x7f\x1b",
    "html": "<a href=\"x\">&'</a>",
    "n": 7,
    "neg": -7,
    "zero": 0,
    "big": 123456789012345678901234567890,
    "f": 2.5,
    "fl": [1.0, -0.0, 0.1, 1e22, 1e16, 1e15, 1e-05, 0.0001, 123456789.125, 1e-07, 1.5e300],
    "t": True,
    "no": False,
    "none": None,
    "nil": None,
    "l": [3, 1, 2],
    "el": [],
    "mixed": [1, "a", None, True, 2.5, [1], {"k": "v"}],
    "words": ["banana", "Apple", "cherry", "apple"],
    "d": {"b": 1, "a": {"x": [1, 2]}, "C": None, "é": "ü"},
    "ed": {},
    "items_key": {"items": [1, 2], "keys": "k", "type": "t"},
    "people": [
        {"name": "Bob", "age": 30, "tags": ["x", "y"], "addr": {"city": "Rome"}},
        {"name": "alice", "age": 25, "tags": [], "addr": {"city": "Oslo"}},
        {"name": "Carol", "age": 30},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <there> \"you\""},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": "é"}}}]},
        {"role": "tool", "content": "42", "name": "f"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object", "properties": {"p": {"type": "string", "enum": ["a", "b"]}}, "required": []}}}],
}

SNIPPETS = []


def add(*templates):
    SNIPPETS.extend(templates)


def each(template, *values):
    for v in values:
        add(template.replace("@", v))


# Printing.
each("{{ @ }}|{{ [@] }}|{{ {'k': @} }}|{{ @ ~ '' }}|{{ @|string }}|{{ (@,) }}",
     "s", "empty", "uni", "lines", "quote", "html", "n", "neg", "big", "f", "fl", "t", "none", "l", "el", "mixed", "d", "ed",
     "1.0", "1e22", "0.1", "1e100", "1.5e-7", "-1", "- 1.5", "true", "None", "()", "(1,)", "(1, 'a')", "'\\n\\t\\\\\\'\\x41\\u00e9\\101\\q'",
     "'a' 'b'", "1_000", "0x1f", "0b101", "0o17", "1_0.5", "1e5", "1E-5", "007", "00")
each("{{ @ }}", "missing", "missing.x", "d.missing", "d.missing.x", "d['missing']", "l[5]", "l[-1]", "l['x']", "s[0]", "s[-1]", "s[99]", "uni[8]", "none.x",
     "none['x']", "n.x", "s.x", "s.items", "d.items is defined", "items_key.items is defined", "items_key['items']", "items_key.items.type", "items_key.type",
     "items_key.keys is callable", "l.append is defined", "d.update is defined", "d.pop", "d.__class__", "s.__class__", "''.__class__.__mro__", "d['__class__']",
     "d.a.x.0", "d.a.x[1]", "l.0", "l.0.x", "d[0]", "d[none]", "d[l]", "l[t]", "s[t]", "l[1.0]", "1, 2", "(1)", "people[0].name", "people.0.name", "missing[0]", "d['é']",
     "messages[0]['role']", "messages[-1].content[0].text", "messages|length", "tools[0].function.parameters.properties.p.enum", "x if t", "x if no", "(1 if no).y")
# Slices.
for v in ("l", "s", "uni", "(1, 2, 3, 4)", "el", "mixed"):
    for sl in (":", "1:", ":1", "-2:", ":-1", "::2", "::-1", "1:3", "5:", "-9:2", "3:1", "3:0:-1", "-1:-4:-2", "::-2", "none:2", "t:", "99::-1", "::99"):
        add("{{ %s[%s] }}" % (v, sl))
each("{{ @ }}", "l['a':]", "l[::0]", "none[1:]", "missing[1:]", "d[1:]", "n[:1]", "s[1.5:]", "l[1:missing]", "messages[1:]|length", "(messages[1:])[0].role")
# String methods.
for m in ("upper", "lower", "title", "capitalize", "swapcase", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "isdigit", "isalpha", "isalnum",
          "isspace", "isupper", "islower", "istitle", "isnumeric", "isdecimal", "isascii", "isidentifier", "isprintable", "casefold"):
    for v in ("s", "empty", "sp", "uni", "lines", "quote", "'123'", "'aB1 cD-eF'", "'ÀÉ é'", "'٣'", "'²'", "'HeLLo wOrLD'", "'ß'", "'\\t '", "\"they're bill's\""):
        add("{{ %s.%s() }}" % (v, m))
for call in ("split(',')", "split('l')", "split('l', 1)", "split(none, 1)", "split(maxsplit=1)", "split(sep='o', maxsplit=1)", "split('')", "split(1)", "split('xyz')",
             "rsplit('l', 1)", "rsplit(none, 1)", "rsplit('o')", "rsplit(' ', 0)", "splitlines(true)", "splitlines(keepends=true)", "strip('Hd')", "strip('lo')", "strip('')", "strip(none)", "strip(1)",
             "lstrip('He')", "rstrip('d\\n ')", "startswith('He')", "startswith(('x', 'He'))", "startswith(['He'])", "startswith('')", "startswith('l', 2)", "startswith('l', 2, 3)", "startswith(1)",
             "endswith('ld')", "endswith(('a', 'd'))", "endswith('')", "endswith('o', 0, 5)", "find('o')", "find('o', 5)", "find('zz')", "find('', 99)", "rfind('o')", "index('W')", "index('zz')", "rindex('l')",
             "count('l')", "count('')", "count('l', 3)", "replace('l', 'L')", "replace('l', 'L', 1)", "replace('', '-')", "replace('', '-', 3)", "replace('l', 1)", "replace('l')", "replace('o', '', 0)",
             "join(['a', 'b'])", "join('xyz')", "join(l)", "join([])", "join(d)", "removeprefix('He')", "removesuffix('ld')", "removeprefix('x')", "removeprefix(1)", "partition(', ')", "partition('x')", "rpartition('o')",
             "zfill(15)", "zfill(2)", "ljust(14)", "ljust(14, '.')", "rjust(14, '*')", "center(15, '-')", "center(16, '-')", "center(3)", "center(15, 'ab')", "format()", "format(1)", "encode()", "upper(1)", "items()", "get('x')", "append('x')",
             "strip(missing)", "startswith(missing)", "isdigit(1)", "strip(chars='H')", "startswith(prefix='H')", "expandtabs()", "translate({})", "nothing()"):
    for v in ("s", "uni", "sp"):
        add("{{ %s.%s }}" % (v, call))
each("{{ @ }}", "'-5'.zfill(4)", "'+5'.zfill(4)", "''.zfill(2)", "'{} {}'.format(1, 'a')", "'{0}{1}{0}'.format(1, none)", "'{a} {b}'.format(a=1, b=l)", "'{{}} {}'.format(2.5)", "'{'.format(1)", "'}'.format(1)",
     "'{} {}'.format(1)", "'{!r}'.format('x')", "'{!s:}'.format(d)", "'{:>5}'.format('x')", "'{0} {}'.format(1, 2)", "'{d.a}'.format(d=d)", "'{}'.format(missing)", "'{:.2f}'.format(f)",
     "'%s-%s' % (1, 'a')", "'%d' % n", "'%05d|%-5d|%+d' % (n, n, n)", "'%5.2f|%.0f|%e' % (f, f, f)", "'%x %X %o' % (255, 255, 8)", "'%s' % l", "'%s' % (l,)", "'%s %s' % l", "'%r' % s", "'%%' % ()", "'%s' % ()", "'a' % 1", "'a' % l", "'a' % ()",
     "'%d' % 'x'", "'%s' % missing", "'%(a)s %(b)d' % {'a': 1, 'b': 2.9}", "'%(a)s' % 1", "'%c' % 65", "'%i' % 2.99", "'%10s|%-10s|' % ('é', 'b')", "'%.2s' % 'abc'", "'%s' % none", "'%5s' % t", "'%z' % 1", "'%' % 1", "'%g' % f", "'%d' % -3.7", "'% d' % 5", "'%03d' % -5",
     "'%s %s'|format(1, 2)", "'%(x)s'|format(x=3)", "'%s'|format", "'%s'|format(l)")
# List, tuple and dict methods.
each("{{ @ }}", "l.append(4)", "l.pop()", "l.count(1)", "l.index(2)", "l.index(9)", "l.copy()", "l.sort()", "l.reverse()", "l.extend([1])", "l.insert(0, 1)", "l.remove(1)", "l.clear()", "(1, 2).index(2)", "(1, 1).count(1)",
     "d.get('b')", "d.get('z')", "d.get('z', 'def')", "d.get('C', 'def')", "d.get()", "d.get(1)", "d.get(l)", "d.get('z', missing)", "d.keys()|list", "d.values()|list", "d.items()|list", "d.items()|first", "d.keys()|join(',')", "d.values()|length", "d.items()|length",
     "d.copy()", "d.pop('b')", "d.update({'z': 1})", "d.setdefault('z', 1)", "d.clear()", "d.popitem()", "missing.get('x')", "none.get('x')", "s.get('x')", "d.nothing()", "d.b()", "d.a.get('x')", "d.a.get('x')[0]", "'b' in d.keys()", "1 in d.values()", "d.items()",
     "d.keys()", "d.keys()[0]", "d.fromkeys('ab')", "items_key.items()|list", "items_key.get('items')", "d|items|list", "d.get(key='b')", "l.x()", "n.bit_length()", "f.is_integer()", "f.hex()", "n.real")
# Arithmetic.
for op in ("+", "-", "*", "/", "//", "%", "**", "~"):
    for a, b in (("n", "2"), ("neg", "2"), ("n", "-2"), ("neg", "-3"), ("f", "2"), ("n", "f"), ("-2.5", "2"), ("2.5", "-2"), ("7.5", "2.5"), ("n", "zero"), ("f", "zero"), ("n", "0.0"), ("t", "t"), ("t", "1"), ("s", "s"), ("s", "n"), ("n", "s"), ("s", "none"), ("none", "s"), ("l", "l"), ("l", "2"),
                 ("2", "l"), ("l", "none"), ("l", "(1,)"), ("(1,)", "(2,)"), ("(1,)", "2"), ("d", "d"), ("s", "d"), ("s", "l"), ("missing", "1"), ("1", "missing"), ("s", "missing"), ("missing", "s"), ("none", "none"), ("s", "t"), ("s", "f"), ("s", "0"), ("s", "-1"), ("big", "1"), ("1", "big"), ("9223372036854775807", "1"), ("-9223372036854775807", "2"), ("3", "40"), ("0.1", "0.2"), ("s", "big")):
        add("{{ %s %s %s }}" % (a, op, b))
each("{{ @ }}", "-n", "+n", "--n", "-f", "+f", "-t", "-s", "+none", "-missing", "-l", "-big", "- -1", "+-1", "-n|abs", "-1|abs", "(-1)|abs", "-'a'|length", "2 ** 3 ** 2", "-2 ** 2", "2 ** -1", "2 ** 0.5", "2 + 3 * 4", "(2 + 3) * 4", "10 - 4 - 3", "100 / 10 / 2", "7 // 2 * 2", "1 ~ 2 + 3", "1 + 2 ~ 3", "'a' ~ 'b' ~ n", "'a' + 'b' ~ 'c'", "'a' + 'b' * 2",
     "1 if t else 2", "1 if no else 2 if no else 3", "1 if no", "'x' ~ (1 if no)", "t and 'a'", "no and 'a'", "no or 'b'", "'' or none or 0 or 'z'", "not t", "not missing", "not not s", "t and not no or no", "(1 or missing.x)", "(0 and missing.x)", "missing or 'd'", "missing and 'd'",
     "1 + true", "true + true", "'a' * t", "l * t", "1 == true", "1.0 == 1", "0.0 == no", "none == no", "'1' == 1", "l == [3, 1, 2]", "(1, 2) == [1, 2]", "d == d", "missing == missing", "missing == other", "missing == ''", "missing == none", "missing != none", "big == big", "big == 1", "big > 1", "big is number", "big is integer",
     "nan_ is defined", "'a' < 'b'", "'B' < 'a'", "1 < 2 < 3", "1 < 3 < 2", "3 > 2 >= 2", "1 < 2.5", "1 < '2'", "'1' < 2", "none < 1", "l < [3, 2]", "[1] < [1, 2]", "[1, 'a'] < [1, 2]", "(1, 2) < (1, 3)", "d < d", "t < 2", "no < t", "missing < 1", "1 < missing", "'é' > 'z'",
     "1 == 1 == 1", "1 == 1 != 2", "'a' in 'abc' == true", "1 < 2 in [2]", "1 in l", "9 in l", "1 not in l", "'a' in s", "'W' in s", "'' in s", "1 in s", "none in s", "s in s", "'b' in d", "'z' in d", "1 in d", "l in d", "1 in n", "1 in none", "1 in missing", "missing in l", "missing in s", "missing in d", "true in [1]", "1.0 in l", "none in mixed", "[1] in mixed",
     "{'k': 'v'} in mixed", "'x' in ('x', 'y')", "'x' in ['y']", "not 'x' in ['y']", "not ('x' in ['x'])", "2 in range(3)", "'role' in messages[0]", "messages[0].role == 'system'", "messages[0].role in ['system', 'developer']", "f == 2.5", "1e3 == 1000")
# Filters.
for f in ("length", "count", "list", "first", "last", "join", "join(', ')", "reverse|list", "sort", "sort(reverse=true)", "unique|list", "min", "max", "sum", "string", "upper", "lower", "title", "capitalize", "trim", "int", "float", "abs", "round", "tojson", "tojson(indent=2)",
          "default('D')", "default('D', true)", "d('D')", "items|list", "dictsort", "batch(2)|list", "slice(2)|list", "indent", "wordcount", "map('string')|list", "map('upper')|join('|')", "select|list", "reject|list", "select('string')|list", "select('number')|list", "replace('l', 'L')", "center(20)", "truncate(8)", "safe", "pprint", "escape", "random", "reverse", "nothing",
          "tojson(sort_keys=true)", "tojson(ensure_ascii=true)", "tojson(separators=(',', ':'))", "tojson(indent=0)", "tojson(indent='--')", "tojson(indent=none)", "tojson(indent=2, sort_keys=true, ensure_ascii=true)"):
    for v in ("s", "empty", "sp", "uni", "lines", "quote", "html", "n", "neg", "big", "f", "t", "none", "l", "el", "mixed", "words", "d", "ed", "people", "missing", "fl", "(3, 1)", "'12'", "' 3.7 '", "'abc def-ghi (jkl) [mno] <pq>'", "messages", "tools"):
        add("{{ %s|%s }}" % (v, f))
each("{{ @ }}", "people|map(attribute='name')|list", "people|map(attribute='name')|join(', ')", "people|map(attribute='addr.city')|first", "people|map(attribute='addr.city', default='?')|list", "people|map(attribute='zip')|list", "people|map(attribute='zip')|join(',')", "people|map(attribute='tags.0')|join(',')", "people|map(attribute='zip', default='0')|join",
     "people|selectattr('age', 'equalto', 30)|map(attribute='name')|join(',')", "people|selectattr('tags')|list|length", "people|selectattr('tags', 'defined')|list|length", "people|rejectattr('tags')|map(attribute='name')|list", "people|rejectattr('age', 'eq', 30)|list|length", "people|selectattr('addr.city', 'in', ['Rome'])|list", "people|selectattr('age', '>', 26)|list|count", "people|selectattr('age', 'gt', 26)|first",
     "people|selectattr", "people|selectattr('age', 'nothing')|list", "people|selectattr('zip', 'undefined')|list|length", "people|sort(attribute='name')|map(attribute='name')|join(',')", "people|sort(attribute='age')|map(attribute='name')|join(',')", "people|sort(attribute='age', reverse=true)|map(attribute='name')|join(',')", "people|sort(attribute='zip')|length", "people|sort(attribute='addr.city')|length", "people|sort",
     "people|groupby('age')|list|length", "people|groupby('age')|map(attribute=0)|list", "people|groupby('addr.city', default='?')|map('first')|list", "people|sum(attribute='age')", "l|sum(start=10)", "people|map(attribute='age')|sum", "people|map(attribute='age')|max", "people|max(attribute='age')", "people|min(attribute='name')", "people|unique(attribute='age')|map(attribute='name')|list", "people|map('length')|list", "people|map('attr', 'name')|list",
     "words|sort", "words|sort(case_sensitive=true)", "words|sort(true)", "words|unique|list", "words|unique(true)|list", "words|min", "words|max", "words|map('length')|list", "words|map('replace', 'a', 'A')|list", "words|map('default', 'x')|list", "words|select('in', ['banana'])|list", "words|reject('equalto', 'Apple')|list", "words|join('-')|upper", "words|first|upper", "words|join(d='+')", "words|join(1)", "people|join(',', attribute='name')", "people|join(',', 'age')",
     "words|batch(3)|map('join')|list", "words|batch(3, 'x')|list", "l|batch(0)|list", "words|slice(3)|list", "words|slice(3, 'x')|list", "words|map|list", "words|map('nothing')|list", "[]|map('nothing')|list", "[]|select('nothing')|list", "words|select('nothing')|list",
     "d|dictsort", "d|dictsort(true)", "d|dictsort(false, 'value')", "{'a': 2, 'B': 1}|dictsort(by='value')", "{'a': 2, 'B': 1}|dictsort(reverse=true)", "{'a': 2, 'B': 1}|dictsort(by='x')", "{'b': 1, 'B': 2, 'a': 3}|dictsort", "{'b': 1, 'B': 2, 'a': 3}|dictsort(true)",
     "d|length", "d|list", "d|first", "d|last", "d|join", "d|sort", "d|tojson|length", "s|trim('Hd')", "s|trim('')", "s|trim(none)", "s|replace('l', 'L', 1)", "s|replace('l', 'L', count=2)", "s|replace('o', none)", "n|replace('7', '8')", "s|replace('l')", "sp|trim|length", "'xxaxx'|trim('x')", "none|trim", "n|trim",
     "s|indent(2)", "lines|indent(2, true)", "lines|indent(width=2, first=true, blank=true)", "lines|indent('> ')", "'a\\n\\nb'|indent", "'a\\n\\nb'|indent(blank=true)", "'a\\nb\\n'|indent(2)", "''|indent(2)", "''|indent(2, true)", "n|indent", "missing|indent",
     "'1'|int", "'x'|int", "'x'|int(5)", "'x'|int(default=none)", "'0x1f'|int(base=16)", "'1_000'|int", "' 12 '|int", "'1.9'|int", "'-1.9'|int", "1.9|int", "-1.9|int", "none|int", "none|int(3)", "l|int", "t|int", "missing|int", "'1e3'|int", "'inf'|int", "'nan'|int", "''|int", "'٣'|int", "big|int", "'123456789012345678901234567890'|int", "'+5'|int", "'--5'|int", "'5_'|int",
     "'1.5'|float", "'x'|float", "'x'|float(1.5)", "'x'|float('d')", "1|float", "none|float", "'inf'|float", "'-inf'|float", "'nan'|float", "'1_0.5'|float", "'.5'|float", "'5.'|float", "'.'|float", "'1e'|float", "'1e5'|float", "t|float", "missing|float", "big|float",
     "2.5|round", "3.5|round", "2.675|round(2)", "1234|round(-2)", "2.4|round(0, 'ceil')", "2.6|round(method='floor')", "2.5|round(1, 'x')", "7|round", "7|round(2)", "t|round", "none|round", "'x'|round", "0.125|round(2)", "1e300|round(2)", "2.5|round|int", "-2.5|round", "-0.4|round",
     "missing|default", "missing|default('x')", "missing|default(none)", "missing|default(missing)", "missing.x|default('x')", "d.z|default('x')", "none|default('x')", "none|default('x', true)", "''|default('x', boolean=true)", "0|default('x', true)", "s|default('x')", "missing|default(default_value='q')", "missing|d(1) + 1", "(missing|default([]))|length", "no|default(true)", "no|default(true, true)", "none|default('')|length",
     "'a\\\"b\\\\c\\n\\u0001\\x7f\\u2028é🙂/'|tojson", "'a\\\"b\\\\c\\n\\u0001\\x7f\\u2028é🙂/'|tojson(ensure_ascii=true)", "(1, 'a')|tojson", "{'b': 1, 'a': [], 'c': {}}|tojson(indent=2)", "{'b': [1, {'x': 2}], 'a': []}|tojson(indent=4, sort_keys=true)", "[]|tojson(indent=2)", "missing|tojson", "{'a': none, 'b': true, 'c': 1.0, 'd': 1e22}|tojson", "d.items|tojson", "range(3)|list|tojson", "d.items()|list|tojson", "'x'|tojson(1)", "s|tojson(false, 2)", "d|tojson(indent=1.5)", "d|tojson(separators=(',',))", "d|tojson(indent=2, separators=(';', '='))", "big|tojson", "-0.0|tojson", "fl|tojson",
     "'nan'|float|tojson", "['inf'|float]|tojson", "{'a': {'b': [1, 2]}}|tojson(indent='\\t')", "d|tojson + 'x'", "(d|tojson)[0:3]", "s|length + 1", "s|length > 3", "s|upper|lower|title", "s|first ~ s|last", "'abc'|reverse", "'abc'|reverse|upper", "l|reverse|join", "l|reverse|first", "'abc'|list", "'é🙂'|list", "'é🙂'|length", "''|first", "[]|first", "[]|last", "[]|max", "[]|sum", "['a']|sum", "[1, 'a']|sum", "[1, 'a']|max", "[[1], [2]]|sum(start=[])", "[0.1, 0.2]|sum", "[1, 2.5]|sum",
     "1|abs", "-1.5|abs", "t|abs", "'x'|abs", "s|wordcount", "'a-b c_d'|wordcount", "s|truncate(5, true)", "s|truncate(9)", "s|truncate(5, true, '')", "s|truncate(9, false, '..', 0)", "'a b c d e f'|truncate(5, false, '', 0)", "s|truncate(2)", "s|center(20) ~ '|'", "html|e", "html|escape ~ html", "html|safe", "html|safe ~ '<'", "html|safe + '<'", "html|string", "s|attr('x')", "d|attr('b')", "range(3)|list", "range(5)|last", "range(5)|length", "range(1, 10, 3)|list", "range(5, 0, -2)|list", "range(0)|list", "range(1, 2, 0)|list", "range('3')|list", "range(100001)|length", "range(100000)|length", "range(10)[2]", "range(3)", "range(3) == range(3)", "range(2.0)|list", "range()|list", "range(3)|join(',')", "range(3)|map('string')|list", "range(3)|sum",
     "(d|items)", "d.items()|map(attribute=0)|list", "d.items()|sort|length", "l|map('float')|list", "l|map('int')|sum", "mixed|map('string')|join('|')", "mixed|select('mapping')|list", "mixed|select('none')|list", "mixed|reject('none')|list", "mixed|select('sequence')|list", "mixed|select('boolean')|list", "mixed|select('integer')|list", "l|select('odd')|list", "l|select('even')|list", "l|select('divisibleby', 2)|list", "l|select('>', 1)|list", "l|select('lt', 3)|list", "l|length|string", "words|tojson|safe")
# Tests.
for test in ("defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping", "sequence", "iterable", "callable", "lower", "upper", "odd", "even", "sameas none", "sameas true", "escaped", "eq 7", "== 7", "in l", "in [1, 7]", "divisibleby 7", "divisibleby(2)", "not none", "not defined", "not string", "nothing", "equalto('x')", "ne 7", "gt 3", "ge(7)", "lessthan 3"):
    for v in ("s", "n", "f", "t", "no", "none", "l", "d", "missing", "d.missing", "(1, 2)", "'abc'", "'ABC'", "zero", "d.items", "big", "'Ab'", "''"):
        add("{{ %s is %s }}" % (v, test))
each("{{ @ }}", "missing.x is defined", "d.z.y is defined", "d.a.x is defined", "not s is string", "s is string and n is number", "s is not string or t", "'x' is in ['x']", "n is number == true", "(n is number) == true", "n is odd if t else 3", "1 is sameas 1", "none is sameas none", "d is sameas d", "raise_exception is defined", "strftime_now is defined", "range is defined", "namespace is defined", "foo is defined", "loop is defined", "n is divisibleby 0", "s is divisibleby 2", "n is eq(7) and t", "s is filter", "'upper' is filter", "'odd' is test", "n is greaterthan f", "n is not odd", "n is not in l", "n is in l or t", "d.items() is iterable", "messages[0].role is string")
# Statements.
add(
    "{% for x in l %}{{ x }},{% endfor %}",
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem.y }}{% endfor %}",
    "{% for x in l %}{{ loop.previtem is defined }}{{ loop.nextitem is not defined }}{% endfor %}",
    "{% for x in l %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }}{% endfor %}",
    "{% for x in l %}{{ loop }}{% endfor %}",
    "{% for x in l %}{{ loop.nothing }}{% endfor %}",
    "{% for x in l %}{{ loop['index'] }}{% endfor %}",
    "{% for x in el %}x{% else %}empty{% endfor %}",
    "{% for x in missing %}x{% else %}empty{% endfor %}",
    "{% for x in none %}x{% endfor %}", "{% for x in n %}x{% endfor %}", "{% for x in t %}x{% endfor %}", "{% for x in big %}x{% endfor %}",
    "{% for c in uni %}[{{ c }}]{% endfor %}", "{% for k in d %}{{ k }},{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|items %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|dictsort %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in s.items() %}{% endfor %}", "{% for k, v in missing.items() %}{% endfor %}",
    "{% for k, v in missing|items %}x{% endfor %}", "{% for k, v in s|items %}x{% endfor %}", "{% for a, b in [[1, 2], (3, 4), 'xy'] %}{{ a }}{{ b }}{% endfor %}", "{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}", "{% for a, b in [1] %}{{ a }}{% endfor %}", "{% for a, b in [[1]] %}{{ a }}{% endfor %}",
    "{% for a, b, c in [[1, 2, 3], 'xyz'] %}{{ a }}{{ b }}{{ c }}{{ loop.index }}{% endfor %}", "{% for a, in [[1]] %}{{ a }}{% endfor %}", "{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "{% for a, b in [] %}{% else %}e{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }},{% endfor %}", "{% for x in l if x > 9 %}{{ x }}{% else %}none{% endfor %}", "{% for x in l if loop.first %}{{ x }}{% endfor %}", "{% for k, v in d.items() if v %}{{ k }}{% endfor %}", "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}", "{% for x in l if y %}{{ x }}{% endfor %}", "{% for m in messages if m.z.y %}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in l %}{% for y in l %}{% if y == 1 %}{% break %}{% endif %}{{ x }}{{ y }},{% endfor %}{% endfor %}", "{% break %}", "{% for x in l %}{{ x }}{% else %}{% break %}{% endfor %}",
    "{% for x in l %}{% for y in el %}{% else %}{% break %}{% endfor %}{{ x }}{% endfor %}", "{% for a, b in [[1, 2], [3]] %}{{ a }}{% break %}{% endfor %}", "{% for x in l %}{% set y %}{% break %}{% endset %}{% endfor %}",
    "{% for x in l recursive %}{{ x }}{{ loop.depth }}{% if loop.depth < 3 %}({{ loop([x + 1]) }}){% endif %}{% endfor %}", "{% for x in [[1, [2, 3]], 4] recursive %}{% if x is iterable %}[{{ loop(x) }}]{% else %}{{ x }}{% endif %}{% endfor %}", "{% for x in l recursive %}{{ loop(l) }}{% endfor %}", "{% for x in l %}{{ loop(l) }}{% endfor %}", "{% for p in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ p.n }}{% if p.c %}<{{ loop(p.c) }}>{% endif %}{{ loop.index }}{% endfor %}",
    "{% for x in l %}{% set y = x %}{{ y }}{% endfor %}{{ y }}", "{% set y = 0 %}{% for x in l %}{{ y }}{% set y = x %}{{ y }}{% endfor %}{{ y }}", "{% set x = 9 %}{% for x in l %}{{ x }}{% endfor %}{{ x }}", "{% for x in l %}{% endfor %}{{ x }}", "{% for x in l %}{% for x in [8, 9] %}{{ x }}{% endfor %}{{ x }}{% endfor %}", "{% for x in l %}{% for y in l %}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}", "{% for x in l %}{{ y }}{% set y = 1 %}{% endfor %}", "{% for loop in l %}{{ loop }}{% endfor %}", "{{ loop }}", "{{ loop.index }}",
    "{% for x in x %}{{ x }}{% endfor %}", "{% for x in [x, y] %}{{ x }}{% endfor %}", "{% for x in [s, n, none] %}{{ x }}{% endfor %}", "{% for x in (1, 2) %}{{ x }}{% endfor %}", "{% for x in 1, 2 %}{{ x }}{% endfor %}", "{% for x in l + [4] %}{{ x }}{% endfor %}", "{% for x in l[1:] %}{{ x }}{% endfor %}", "{% for x in l|sort %}{{ x }}{% endfor %}", "{% for x in l|reverse %}{{ x }}{% endfor %}", "{% for x in messages|selectattr('role', 'equalto', 'user') %}{{ x.content }}{% endfor %}", "{% for x in range(3) %}{{ x }}{% endfor %}", "{% for x in range(n - 1, -1, -1) %}{{ x }}{% endfor %}", "{% for x in (l if t else el) %}{{ x }}{% endfor %}", "{% for x in l if t else el %}{{ x }}{% endfor %}", "{% for x in words|map('upper') %}{{ x }}{% endfor %}", "{% for x in people|map(attribute='zip') %}[{{ x }}{{ x is defined }}]{% endfor %}", "{% for x in people|map(attribute='zip') %}{{ x.y }}{% endfor %}", "{% for x in people|map(attribute='addr') %}{{ x.city }}{% endfor %}", "{% for b in words|batch(2) %}{{ b }}{% endfor %}", "{% for g in people|groupby('age') %}{{ g.grouper }}:{{ g.list|length }};{% endfor %}", "{% for g, items in people|groupby('age') %}{{ g }}:{{ items|length }};{% endfor %}", "{% for x in d.keys() %}{{ x }}{% endfor %}", "{% for x in d.values() %}{{ x }}{% endfor %}",
    "{% if s %}a{% elif n %}b{% else %}c{% endif %}", "{% if empty %}a{% elif zero %}b{% else %}c{% endif %}", "{% if el %}a{% elif ed %}b{% elif none %}c{% elif missing %}d{% elif f %}e{% endif %}", "{% if missing.x %}a{% endif %}", "{% if not missing %}a{% endif %}", "{% if 0.0 %}a{% else %}b{% endif %}", "{% if 1, %}a{% endif %}", "{% if d.items %}a{% endif %}", "{% if d.items() %}a{% endif %}", "{% if x is defined and x %}a{% else %}b{% endif %}", "{% if t %}{% if no %}a{% else %}b{% endif %}{% endif %}", "{% if t: %}a{% endif %}", "{% if %}a{% endif %}", "{% if t %}a{% else %}b{% elif no %}c{% endif %}", "{% if t %}a", "{% endif %}", "{% foo %}", "{{ }}", "{{ 1 2 }}", "{{ 1", "{% set %}", "{# x", "{{ 'a }}", "{{ (1 }}", "{{ 1) }}", "{{ [1, }}", "{{ {'a' 1} }}", "{{ a b }}", "{{ 1 + }}", "{{ @ }}", "{{ $x }}", "{{ a.'b' }}", "{{ x|1 }}", "{{ x is 1 }}", "{{ not }}", "{{ f(a=1, 2) }}", "{{ ! }}", "{% if x = 1 %}{% endif %}", "{{ x; }}", "{{ {1} }}", "{{ [1 2] }}",
    "{% set x = 1 %}{{ x }}", "{% set x = 1, 2 %}{{ x }}", "{% set x, y = 1, 2 %}{{ y }}{{ x }}", "{% set x, y = [1, 2] %}{{ y }}{{ x }}", "{% set x, y = 'ab' %}{{ y }}{{ x }}", "{% set x, y = 1 %}", "{% set x, y = [1] %}", "{% set x, y = missing %}", "{% set x, y = d.a %}", "{% set (x, y) = l[:2] %}{{ x }}", "{% set x = x %}{{ x }}", "{% set s = s + '!' %}{{ s }}", "{% set s = s %}{{ s }}", "{% if no %}{% set q = 1 %}{% endif %}{{ q }}", "{% if t %}{% set q = 1 %}{% endif %}{{ q }}", "{% set x = missing %}{{ x is defined }}", "{% set x = none %}{{ x is none }}{{ x }}", "{% set x = [1] + [2] %}{{ x }}", "{% set x = {'a': 1} %}{{ x.a }}", "{% set d.x = 1 %}", "{% set l[0] = 1 %}", "{% set x = 1 if t else 2 %}{{ x }}", "{% set x = [] %}{{ x.append(1) }}", "{% set x = [] %}{% set _ = x.append(1) %}{{ x }}", "{% do l.append(1) %}", "{% set x = 'a' ~ 'b' %}{{ x }}", "{% set x=1 %}{%set y=2%}{{x+y}}", "{% set x = y = 1 %}", "{% set 1 = x %}", "{% set none = 1 %}", "{% set true = 1 %}", "{% set x = d.items() %}{{ x|list }}", "{% set x = people|map(attribute='name') %}{{ x|list }}{{ x|list }}", "{% set x = people|map(attribute='name')|list %}{{ x }}", "{% set f = s.upper %}{{ f() }}", "{% set loop = 1 %}{{ loop }}", "{% set range = 3 %}{{ range }}", "{% set namespace = 3 %}{{ namespace }}", "{% set null = 3 %}{{ null }}", "{{ null }}", "{{ null is defined }}", "{% set é = 1 %}{{ é }}", "{% set content = content.x %}{{ content }}",
    "{% set x %}a{{ n }}b{% endset %}{{ x }}{{ x|length }}", "{% set x %}{% for y in l %}{{ y }}{% endfor %}{% endset %}[{{ x }}]", "{% set x | upper %}abc{% endset %}{{ x }}", "{% set x | replace('a', 'b') | upper %}abc{% endset %}{{ x }}", "{% set x %}{% set y = 5 %}{{ y }}{% endset %}{{ x }}{{ y }}", "{% set y = 1 %}{% set x %}{% set y = 5 %}{{ y }}{% endset %}{{ x }}{{ y }}", "{% set x %}{% endset %}[{{ x }}]", "{% set x %}a", "{% set ns = namespace() %}{% set ns.x %}abc{% endset %}{{ ns.x }}", "{% set x %}\n  a\n  {% endset %}[{{ x }}]",
    "{% set ns = namespace(a=1) %}{% for x in l %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}", "{% set ns = namespace() %}{{ ns.a }}{{ ns.a is defined }}", "{% set ns = namespace() %}{{ ns.a.b }}", "{% set ns = namespace(items=[1]) %}{{ ns.items }}{% set ns.items = ns.items + [2] %}{{ ns.items }}", "{% set ns = namespace(get=1, keys=2) %}{{ ns.get }}{{ ns.keys }}", "{% set ns = namespace(a=1) %}{{ ns }}", "{% set ns = namespace(a=1) %}{{ ns['a'] }}", "{% set ns = namespace({'a': 1}) %}{{ ns.a }}", "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}", "{% set ns = namespace(a=1) %}{{ ns is mapping }}{{ ns is defined }}", "{% set ns = namespace(a=1) %}{{ ns|length }}", "{% set ns = namespace(a=1) %}{% if ns %}x{% endif %}", "{% set ns.a = 1 %}", "{% set ns = {'a': 1} %}{% set ns.a = 2 %}", "{% set ns = namespace(a=[]) %}{% for x in l %}{% set ns.a = ns.a + [x] %}{% endfor %}{{ ns.a|join(',') }}", "{% if no %}{% set ns = namespace(a=1) %}{% endif %}{{ ns.a }}", "{% if no %}{% set ns = namespace(a=1) %}{% endif %}{% set ns.a = 1 %}", "{% for x in l %}{% set ns = namespace(v=x) %}{% set ns.v = ns.v * 2 %}{{ ns.v }},{% endfor %}", "{% set ns = namespace(a=1) %}{% macro m(n) %}{% set n.a = n.a + 1 %}{% endmacro %}{{ m(ns) }}{{ m(ns) }}{{ ns.a }}", "{% set ns = namespace(a=1) %}{% macro m() %}{% set ns.a = ns.a + 1 %}{% endmacro %}{{ m() }}{{ ns.a }}", "{% macro m(n) %}{% set n.a = 1 %}{% endmacro %}{{ m(d) }}", "{% macro m(n) %}{{ n.a }}{% endmacro %}{% set q = namespace(a=5) %}{{ m(q) }}{{ m({'a': 6}) }}", "{% set a = namespace(x=1) %}{% set b = a %}{% set b.x = 2 %}{{ a.x }}",
    "{% macro m(a, b=2) %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=4, a=5) }}{{ m() }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(c=2) }}", "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1, 2) }}", "{% macro m() %}{% for x in varargs %}{{ x }};{% endfor %}{% endmacro %}{{ m(1, 2) }}{{ m() }}", "{% macro m() %}{% for x in varargs %}{{ x is defined }}{{ x.y }};{% endfor %}{% endmacro %}{{ m(missing) }}", "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(a=1) }}", "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}", "{% macro m(a, b=missing) %}{{ b is defined }}{% endmacro %}{{ m(1) }}", "{% macro m(a=1) %}{{ a }}{% endmacro %}{{ m(missing) }}{{ m(none) }}", "{% macro m(a=1, b) %}{% endmacro %}", "{% macro m(a, a) %}{{ a }}{% endmacro %}", "{% macro m() %}{{ s }}{% endmacro %}{{ m() }}", "{% set q = 1 %}{% macro m() %}{{ q }}{% endmacro %}{% set q = 2 %}{{ m() }}", "{% macro m() %}{{ q }}{% endmacro %}{% set q = 2 %}{{ m() }}", "{% macro m() %}{% set s = 'x' %}{{ s }}{% endmacro %}{{ m() }}{{ s }}", "{% macro m() %}{{ m }}{% endmacro %}", "{{ m() }}{% macro m() %}x{% endmacro %}", "{% macro m(n) %}{{ n }}{% if n > 0 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(5) }}", "{% macro a() %}a{{ b() }}{% endmacro %}{% macro b() %}b{% endmacro %}{{ a() }}", "{% macro m() %}x{% endmacro %}{{ m }}", "{% macro m() %}x{% endmacro %}{{ m.name }}", "{% macro m() %}x{% endmacro %}{{ m is defined }}{{ m is callable }}", "{% macro m() %} x {% endmacro %}{{ m()|trim }}{{ m() + 'y' }}{{ m() ~ 1 }}{{ m()|length }}", "{% macro m(x) -%}\n  {{ x }}\n{%- endmacro %}[{{ m('a') }}]", "{% if t %}{% macro m() %}x{% endmacro %}{% endif %}{{ m() }}", "{% if no %}{% macro m() %}x{% endmacro %}{% endif %}{{ m() }}", "{% for i in l %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}", "{% macro m() %}1{% endmacro %}{% macro m() %}2{% endmacro %}{{ m() }}", "{% macro m(x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}{{ m(l) }}{{ m('ab') }}{{ m(missing) }}", "{% macro m(x) %}{{ x.y }}{% endmacro %}{{ m(missing) }}", "{% macro m(x) %}{{ x.role }}{% endmacro %}{% for q in messages %}{{ m(q) }}{% endfor %}", "{% macro m(x) %}{% for x in [1, 2] %}{{ x.y }}{% endfor %}{{ x }}{% endmacro %}{{ m(3) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ [m][0](3) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(*[1]) }}{{ m(*l) }}", "{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{% set fs = [m] %}{{ fs[0](*[1, 2]) }}{{ fs[0](1) }}", "{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(**{'a': 1, 'b': 2}) }}", "{% macro m(range) %}{{ range }}{% endmacro %}{{ m(3) }}", "{% macro m(messages) %}{{ messages }}{% endmacro %}{{ m(3) }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}body{{ n }}{% endcall %}", "{% macro m(x) %}{{ caller(x) }}{{ caller(x + 1) }}{% endmacro %}{% call(y) m(1) %}[{{ y }}]{% endcall %}", "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}", "{% macro m() %}{{ caller is defined }}{% if caller %}{{ caller() }}{% endif %}{% endmacro %}{{ m() }}{% call m() %}c{% endcall %}", "{% macro m() %}x{% endmacro %}{% call m() %}{% endcall %}", "{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}", "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call m() %}x{% endcall %}", "{% macro m() %}{{ caller() }}{% endmacro %}{% call(y) m() %}{{ y is defined }}{% endcall %}", "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{% set s = 1 %}{{ s }}{% endcall %}{{ s }}", "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% for x in l %}{% call m() %}{{ x }}{{ loop.index }}{% endcall %}{% endfor %}", "{% call s.upper() %}{% endcall %}", "{% call 1 %}{% endcall %}",
    "{% filter upper %}abc{{ s }}{% endfilter %}", "{% filter replace('a', 'b')|upper %}aaa{% endfilter %}", "{% filter trim %}  a {% set z = 1 %}{{ z }} {% endfilter %}|{{ z }}", "{% filter nothing %}x{% endfilter %}", "{% filter tojson %}a\"b{% endfilter %}", "{% filter indent(2) %}a\nb{% endfilter %}", "{% filter length %}abc{% endfilter %}", "{% filter list %}ab{% endfilter %}",
    "{% with x = 1, y = n %}{{ x }}{{ y }}{% endwith %}{{ x }}", "{% with %}{% set x = 1 %}{{ x }}{% endwith %}{{ x }}", "{% with x = 1, y = x %}{{ y }}{% endwith %}", "{% with s = 'q' %}{{ s }}{% endwith %}{{ s }}", "{% for x in l %}{% with y = x %}{{ y }}{{ loop.index }}{% endwith %}{% endfor %}",
    "{% generation %}a{{ n }}{% endgeneration %}", "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "{% for x in l %}{%- generation %} {{ x }} {% endgeneration -%} ,{% endfor %}", "{% for x in l %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", "a\n{% generation %}\nb\n{% endgeneration %}\nc",
    "{% block x %}a{% endblock %}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% autoescape true %}{{ html }}{% endautoescape %}", "{% print s, n %}", "{{ self }}", "{{ super() }}", "{{ lipsum() }}", "{{ cycler(1, 2).next() }}", "{% set j = joiner(', ') %}{{ j() }}{{ j() }}", "{{ dict(a=1, b=n) }}", "{{ dict({'x': 1}, a=2) }}", "{{ dict([['a', 1]]) }}", "{{ dict(a=1)|tojson }}", "{{ dict(a=missing)|tojson }}", "{{ dict(1) }}", "{{ namespace(a=1).a }}", "{{ raise_exception('boom') }}", "{{ raise_exception() }}", "{{ raise_exception(n) }}", "{% if no %}{{ raise_exception('boom') }}{% endif %}ok", "{{ 'x' if t else raise_exception('boom') }}", "{{ missing() }}", "{{ s() }}", "{{ d.missing() }}", "{{ foo.bar() }}", "{% if no %}{{ x|nothing }}{% endif %}ok", "{{ x|nothing if no else 'ok' }}", "{% if t %}{{ x|nothing }}{% endif %}", "{% if no %}{{ x is nothing }}{% endif %}ok", "{% if no %}{% for x in l %}{{ x|nothing }}{% endfor %}{% endif %}ok", "{{ (x|nothing) if no }}", "{% if t %}{{ s|from_json }}{% else %}a{% endif %}",
)
# White space.
for left in ("", "-", "+"):
    for right in ("", "-", "+"):
        add("a\n  {%%%s if t %s%%}  \n  b\n  {%%%s endif %s%%}\n  c" % (left, right, left, right), "a  {%%%s if t %s%%}\n\n b {%%%s endif %s%%}  c" % (left, right, left, right), "a \n {#%s c %s#} \n b" % (left, right), "x {#%s c %s#}\ny" % (left, right), " {%%%s set x = 1 %s%%} \n {%%%s set y = 1 %s%%}\n z" % (left, right, left, right),
            "a\n {%%%s raw %s%%} \n {{ x }} {%% if %%} {%%%s endraw %s%%} \n b" % (left, right, left, right), "{%%%s for x in l %s%%}\n  {{ x }}\n{%%%s endfor %s%%}\n" % (left, right, left, right), "{%% if t %%}{{%s ' a ' %s}} \n {%% endif %%}" % (left if left != "+" else "", right if right != "+" else ""), "a\n\t{%%%s if t %s%%}\t\n\tb{%% endif %%}" % (left, right))
add("a\n", "a\n\n", "\n", "", "a\r\nb\r\n", "a\rb\r", "{{ 'a\r\nb' }}", "{% if t %}\r\n  x\r\n{% endif %}\r\ny", "{%- if t -%}\n x \n{%- endif -%}\n", "a {{- 'b' -}} c", "a{{- '' -}}\n\n b", "a\u00a0\u2003{{- 'b' -}}\u3000c", "a\u00a0{%- if t %}b{% endif %}", "\u00a0{% if t %}b{% endif %}", "{{ '  a  ' }}\n{{ 'b' }}\n", "{% raw %}{{ x }}{% endraw %}", "{% raw %}\n{{ x }}\n{% endraw %}\n", "{%raw%}{% raw %}{%endraw%}", "{% raw -%}  a  {%- endraw %}", "{# {{ x }} #}a", "{# a #}\n{# b #}\nc", "{#- a -#}\n b", "{##}a", "a{#\n#}\nb", "{{ '{{' }}{{ '}}' }}{{ '{%' }}{{ '#}' }}", "{ {a} {{ {'a': {'b': 1}} }} }", "{{ {'a': {}} }}", "{{'a'}}}", "{{{'a': 1}}}", "{{ {'a': 1}}}", "{% if t -%} \n\n a {%- endif %}", "{% for x in l -%} {{ x }} {%- endfor %}", "  {{ s }}  \n  {% if t %}\n    x\n  {% endif %}\n  y\n", "{% if t %} {% endif %}|", "{% if t %}\n\n{% endif %}|", "\n\n{% if t %}x{% endif %}\n\n", "{{ s -}}\n\n{{- s }}", "{%- set x = 1 -%}\n\n\n{{ x }}", "a {% if t %}b{% endif %} c {# d #} e", "{% if t %}{# c #}\n{% endif %}x", "{% if t %}  {# c #}  {% endif %}x", "   {#- c #} x", "{{ s }}{% if t %}\n{% endif %}\n{{ n }}", "{{ n }}  {% if t %}x{% endif %}", "{{ n }}\n  {% if t %}x{% endif %}", "{% if t %}a{% endif %}  {% if t %}b{% endif %}", "{% if t %}\n  {% if t %}\n    a\n  {% endif %}\n{% endif %}\nb", "{%if t%}a{%endif%}", "{%\nif t\n%}a{%\nendif\n%}", "{{\ns\n}}", "{{-s-}}", "{{ -1 }}", "{{- -1 }}", "{{ 1 -}} x", "{{ s|\nupper }}", "x{%- raw -%} {{ y }} {%- endraw -%} z", "{% if t %}a\n{%- endif %}\n\nb", "a\n{%+ if t %}b{% endif %}\n", "{% if t +%}\nb{% endif %}", "{{ '\\\n' }}", "{{ 'a\\\nb' }}", "\ufeffa", "{{ \"it's\" }}{{ 'say \"x\"' }}", "{{ '\\ud83d' }}", "{{ '\\N{DASH}' }}", "{{ '\\x4' }}", "{{ '\\u00e9\\U0001f642' }}", "{{ '\\0' }}|{{ '\\777' }}", "{{ 'é\\n' }}", "{{ '\\é' }}")
# Time.
each("{{ strftime_now('@') }}", "%Y-%m-%d", "%d %b %Y", "%B %d, %Y", "%A, %d %B %Y", "%a %H:%M:%S", "%I:%M %p", "%y%j", "%U %W %w %u %V %G", "%-d/%-m", "%e|%k|%l", "%D %T %R %F", "%c", "%x %X", "%%", "%f", "%z|%Z|", "%s", "%Q", "%", "%h%n%t", "%C", "%-I:%M", "%E", "é %Y", "%P", "%#d", "")
add("{{ strftime_now() }}", "{{ strftime_now(1) }}", "{{ strftime_now(format='%Y') }}", "{% set d = strftime_now('%d') %}{{ d|int + 1 }}")
# Safe.
add("{% set x = html|safe %}{{ x }}", "{% set x = html|tojson|safe if t else s %}{{ x }}{{ x is string }}{{ x|length }}", "{% set x = 'a'|safe %}{{ x + '<' }}", "{% set x = 'a'|safe %}{{ '<' + x }}", "{% set x = 'a'|safe %}{{ 'b' + x }}", "{% set x = 'a'|safe %}{{ x ~ '<' }}", "{% set x = 'a'|safe %}{{ x.replace('a', '<') }}", "{% set x = 'a'|safe %}{{ x == 'a' }}", "{% set x = '<'|safe %}{{ x|tojson }}", "{% set x = '<'|safe %}{{ ['&', x]|join }}", "{% set x = '<'|safe %}{{ x|string + '&' }}", "{% set x = '%s'|safe %}{{ x % '<' }}", "{{ ('a'|safe)|upper }}", "{{ n|safe }}", "{{ none|safe }}", "{{ missing|safe }}")
# Scopes and what is declared.
add("{% set x = a %}{{ b.c }}{% for y in z %}{{ y }}{{ w }}{% endfor %}{{ y }}", "{% if not g is defined %}{% set g = false %}{% endif %}{{ g }}", "{% set g = 1 %}{{ g }}", "{{ g }}{% set g = 1 %}", "{% macro m(a, b=q) %}{{ a }}{{ r }}{{ kwargs }}{{ varargs }}{{ caller }}{% endmacro %}", "{% if a %}{% set k = 1 %}{% elif b %}{% set k = 2 %}{% endif %}{{ k }}", "{% if a %}{% set k = 1 %}{% else %}{% set k = 2 %}{% endif %}{{ k }}", "{% for a in b if c and a %}{{ loop.index }}{% else %}{{ e }}{% endfor %}", "{% for a in b %}{{ a }}{% endfor %}{{ loop }}", "{% set ns = namespace(a=b) %}{% set ns.a = c %}{{ ns.a }}", "{% set x %}{{ inner }}{% set inner2 = 1 %}{{ inner2 }}{% endset %}{{ inner2 }}", "{% generation %}{{ g1 }}{% set g2 = 1 %}{% endgeneration %}{{ g2 }}", "{{ range(3)|list }}{{ dict() }}{{ lipsum is defined }}{{ raise_exception is defined }}", "{% for k, v in dd.items() %}{{ k }}{{ v }}{% endfor %}", "{% with a = b %}{{ a }}{{ c }}{% endwith %}{{ a }}", "{% for x in xs %}{% if x %}{% set found = x %}{% endif %}{{ found }}{% endfor %}{{ found }}", "{{ a if b else c }}", "{{ a|default(b) }}{{ c is eq(e) }}", "{% filter replace(a, b) %}{{ c }}{% endfilter %}", "{% call(x) m(y) %}{{ x }}{{ z }}{% endcall %}", "{% set a = a or 'x' %}{{ a }}", "{% for i in j %}{% for i in i %}{{ i }}{% endfor %}{% endfor %}")


class Random:
    """Random templates over VARS: mostly sound ones, some that fail."""

    FILTERS = ("length", "list", "first", "last", "join", "join(', ')", "sort", "unique|list", "string", "upper", "lower", "title", "capitalize", "trim", "int", "float", "abs", "tojson", "tojson(indent=2)", "default('D')", "default('D', true)",
               "items|list", "dictsort", "reverse|list", "map('string')|list", "map(attribute='name')|list", "select|list", "selectattr('name')|list", "selectattr('role', 'equalto', 'user')|list", "rejectattr('age', 'eq', 30)|list", "replace('l', 'L')", "indent(2)", "batch(2)|list", "min", "max", "sum", "round", "wordcount")
    METHODS = ("upper()", "lower()", "strip()", "split()", "split(',')", "split('l', 1)", "rsplit('o', 1)", "splitlines()", "startswith('H')", "endswith(('d', '\\n'))", "replace('o', '0')", "lstrip('H')", "rstrip('\\n')", "title()", "capitalize()",
               "find('o')", "count('l')", "join(words)", "get('a')", "get('z', 'q')", "items()|list", "keys()|list", "values()|list", "removeprefix('He')", "isdigit()", "zfill(5)", "format(1, 2)", "index(1)", "copy()", "nothing()")
    TESTS = ("defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping", "sequence", "iterable", "odd", "even", "in l", "in s", "eq 7", "divisibleby 2", "lower", "upper", "callable")
    ATTRS = ("name", "role", "content", "age", "addr", "city", "items", "get", "x", "a", "b", "tags", "upper", "keys", "0", "type", "function", "tool_calls")

    def __init__(self, seed):
        self.r = random.Random(seed)
        self.names = []

    def pick(self, *choices):
        return self.r.choice(choices)

    def name(self):
        if self.names and self.r.random() < 0.5:
            return self.r.choice(self.names)
        return self.r.choice(list(VARS) + ["missing"])

    def atom(self):
        return self.pick(self.name, self.name, self.name, lambda: self.pick("1", "0", "-1", "2.5", "'a'", "'Hello'", "''", "none", "true", "false", "[]", "{}", "[1, 2]", "('a', 1)", "{'a': 1}", "'%s'", "'\\n'", "7"))()

    def expr(self, depth):
        if depth <= 0:
            return self.atom()
        e = lambda: self.expr(depth - self.r.randint(1, 2))
        kind = self.r.randint(0, 17)
        if kind in (6, 7) and self.r.random() < 0.7:
            return f"{self.pick('s', 'sp', 'lines', 'uni', 'words[0]', 'messages[0].content', 's|upper')}.{self.r.choice(self.METHODS)}"
        if kind <= 1:
            return f"({e()}).{self.r.choice(self.ATTRS)}" if kind else f"{self.name()}.{self.r.choice(self.ATTRS)}"
        if kind == 2:
            return f"{self.name()}[{self.pick('0', '-1', '1', repr(self.r.choice(self.ATTRS)), e())}]"
        if kind == 3:
            b = lambda: self.pick("", "", "1", "-1", "2", "0", "n")
            return f"({e()})[{b()}:{b()}{self.pick('', '', ':' + self.pick('1', '2', '-1'))}]"
        if kind <= 5:
            return f"({e()})|{self.r.choice(self.FILTERS)}"
        if kind <= 7:
            return f"({e()}).{self.r.choice(self.METHODS)}"
        if kind == 8:
            return f"({e()} is {self.pick('', '', 'not ')}{self.r.choice(self.TESTS)})"
        if kind <= 11:
            return f"({e()} {self.pick('+', '+', '~', '~', '~', '~', '-', '*', '//', '%')} {e()})"
        if kind == 12:
            return f"({e()} {self.pick('==', '!=', '<', '<=', '>', '>=', 'in', 'not in')} {e()})"
        if kind == 13:
            return f"({e()} {self.pick('and', 'or')} {e()})"
        if kind == 14:
            return f"(not {e()})"
        if kind == 15:
            return f"({e()} if {e()}{self.pick('', f' else {e()}', f' else {e()}')})"
        if kind == 16:
            return self.pick(f"[{e()}, {e()}]", f"({e()}, {e()})", f"{{'k': {e()}, 'l': {e()}}}")
        return f"{e()} + {e()} + {e()}"

    def space(self):
        return self.pick("", "", " ", "\n", "\n  ", "  \n", "x", " y\n")

    def tag(self, inside):
        return f"{{%{self.pick('', '', '-', '+')} {inside} {self.pick('', '', '-', '+')}%}}"

    def body(self, depth):
        return "".join(self.space() + self.node(depth) + self.space() for _ in range(self.pick(1, 1, 2)))

    def node(self, depth):
        kind = self.r.randint(0, 9) if depth > 0 else 0
        e = lambda: self.expr(self.pick(0, 0, 1, 1, 1, 2))
        if kind <= 3:
            return "{{" + self.pick("", "-", "") + " " + e() + " " + self.pick("", "-") + "}}"
        before = list(self.names)
        try:
            if kind == 4:
                return self.tag("if " + e()) + self.body(depth - 1) + self.pick("", self.tag("elif " + e()) + self.body(depth - 1)) + self.pick("", self.tag("else") + self.body(depth - 1)) + self.tag("endif")
            if kind == 5:
                over = self.pick("messages", "people", "l", "words", "d", "s", "range(3)", "el", e(), "messages[1:]", "people|selectattr('tags')")
                head = self.tag(f"for q in {over}{self.pick('', '', ' if q')}")
                self.names += ["q", "q", "q", "q.name", "q.role", "q.content", "q['name']", "loop.index", "loop.first", "loop.last", "loop.index0"]
                return head + self.body(depth - 1) + self.pick("", self.tag("if q == 1") + self.tag(self.pick("break", "continue")) + self.tag("endif")) + self.pick("", "", self.tag("else") + "none") + self.tag("endfor")
            if kind == 6:
                head = self.tag(f"for k, v in {self.pick('d.items()', 'd|dictsort', 'items_key|items', '[[1, 2], (3, 4)]', e())}")
                self.names += ["k", "v", "v", "loop.last"]
                return head + self.body(depth - 1) + self.tag("endfor")
            if kind == 7:
                return self.tag("set w = " + e()) + "{{ w }}" + self.pick("", "{{ w + 'x' }}", "{{ w is string }}")
            if kind == 8:
                self.names += ["ns.a", "ns.b"]
                return self.tag(f"set ns = namespace(a={self.atom()})") + self.tag("set ns.b = " + e()) + self.body(depth - 1)
            return self.tag("set w") + self.body(depth - 1) + self.tag("endset") + "[{{ w }}]"
        finally:
            if kind in (5, 6):
                self.names = before

    def template(self):
        self.names = []
        macro = ""
        if self.r.random() < 0.2:
            self.names = ["p", "p", "o"]
            macro = self.tag("macro m(p, o=2)") + self.body(1) + self.tag("endmacro")
            self.names = []
            macro += "{{ m(" + self.expr(1) + ") }}" + self.pick("", "{{ m(" + self.expr(1) + ", " + self.expr(1) + ") ~ 'z' }}", "{{ m(o=1) }}")
        return macro + self.body(2)


def main():
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        made = Random(int(sys.argv[2]))
        SNIPPETS[:] = [made.template() for _ in range(int(sys.argv[1]))]
    env, bare = environment(), environment(renders=False)
    cases = []
    for source in dict.fromkeys(SNIPPETS):
        case = {"source": source}
        try:
            case["names"] = sorted(jinja2.meta.find_undeclared_variables(bare.parse(source)))
        except Exception:
            pass
        try:
            template = env.from_string(source)
        except Exception as e:
            case["broken"] = type(e).__name__
        else:
            try:
                out = template.render(**copy.deepcopy(VARS))  # some filters change lists
                out.encode()
                case["out"] = out
            except Exception as e:
                case["error"] = type(e).__name__ + ": " + str(e)[:80]
        if " at 0x" in case.get("out", "") or " at 0x" in case.get("error", ""):
            case.pop("out", None)
            case.pop("error", None)
            case["address"] = True  # of an object: nothing that could be compared
        cases.append(case)
    path = sys.argv[3] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "snippets.json.gz")
    text = json.dumps({"vars": VARS, "cases": cases}, ensure_ascii=False, separators=(",", ":"))
    with gzip.GzipFile(path, "wb", mtime=0) as f:
        f.write(text.encode())
    print(len(cases), "snippets")


if __name__ == "__main__":
    main()
