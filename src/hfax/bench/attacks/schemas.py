"""JSON schemas that are expensive, contradictory or no schemas: what a client may ask a grammar compiler to read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

PRIMES = (62_615_533, 32_452_843, 49_979_687, 67_867_967, 86_028_121, 15_485_863, 2_147_483_647, 4_294_967_291)
_HUGE = (10**4, 10**6, 2**31, 2**63, 10**30)
_PATTERNS = {
    "nested plus": "(a+)+$",
    "nested star": "((a*)*)*b",
    "alternation": "(a|a|aa)+c",
    "counted twice": "(a{1000}){1000}",
    "any counted": ".{0,100000}x.{0,100000}",
    "suffix": ".*a.{30}",
    "optional row": "(a?){100}a{100}",
    "word row": r"(\w+\s?){50}$",
    "mail": r"^([a-zA-Z0-9])(([\-.]|[_]+)?([a-zA-Z0-9]+))*(@){1}[a-z0-9]+[.]{1}(([a-z]{2,3})|([a-z]{2,3}[.]{1}[a-z]{2,3}))$",
    "letters": r"\p{L}{200}\p{N}{200}",
    "lookahead": "(?=a)(?!b)c",
    "back-reference": r"(a+)\1",
    "unclosed": "(",
}
_FORMATS = ("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "ipv4", "ipv6", "uuid", "uri",
            "iri-reference", "json-pointer", "regex", "made-up")  # fmt: skip
_BOUNDS = (("minItems", "maxItems"), ("minLength", "maxLength"), ("minProperties", "maxProperties"))
_OF = {"Items": "array", "Length": "string", "Properties": "object"}

Named = Iterator[tuple[str, Any]]


def schemas(seed: int) -> dict[str, Any]:
    """At least 120 schemas by name; the seed chooses the words of enums."""
    found: dict[str, Any] = {}
    for part in (_multiples(), _sizes(), _patterns(), _products(), _references(), _depths(), _enums(random.Random(seed)),
                 _overlaps(), _conditions(), _contradictions(), _no_schemas()):  # fmt: skip
        for name, schema in part:
            assert name not in found, name
            found[name] = schema
    return found


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _multiples() -> Named:
    for prime in PRIMES:
        yield f"multipleOf {prime}", {"type": "integer", "multipleOf": prime}
    one, two, three = PRIMES[:3]
    yield "multipleOf of two primes", {"allOf": [{"type": "integer", "multipleOf": p} for p in (one, two)]}
    yield "multipleOf of three primes", {"allOf": [{"type": "integer", "multipleOf": p} for p in (one, two, three)]}
    yield "multipleOf with bounds", {"type": "integer", "multipleOf": one, "minimum": 10**12, "maximum": 10**18}
    yield (
        "multipleOf of small primes",
        {"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]},
    )
    yield "multipleOf row", _object(**{f"x{p}": {"type": "integer", "multipleOf": p} for p in PRIMES})
    for step in (1e-9, 0.1234567891, 1e308, 5e-324, 0, -3):
        yield f"multipleOf {step}", {"type": "number", "multipleOf": step}


def _sizes() -> Named:
    for low, high in _BOUNDS:
        kind = _OF[low[3:]]
        for size in _HUGE:
            yield f"{low} {size}", {"type": kind, low: size}
            yield f"{high} {size}", {"type": kind, high: size}
    yield "minItems in minItems", {
        "type": "array", "minItems": 1000,
        "items": {"type": "array", "minItems": 1000, "items": {"type": "string", "minLength": 1000}},
    }  # fmt: skip
    yield "large range", {"type": "integer", "minimum": -(10**300), "maximum": 10**300}
    yield "range of reals", {"type": "number", "exclusiveMinimum": 1e-300, "exclusiveMaximum": 1.7976931348623157e308}
    yield "close reals", {"type": "number", "minimum": 0.1234567890123456, "maximum": 0.1234567890123457}


def _patterns() -> Named:
    for name, pattern in _PATTERNS.items():
        yield f"pattern {name}", {"type": "string", "pattern": pattern}
    yield "pattern and length", {"type": "string", "pattern": "^(ab|a|b)*$", "minLength": 5000, "maxLength": 50000}
    yield "patterns in allOf", {"allOf": [{"type": "string", "pattern": f".*{c}.{{12}}"} for c in "abcdefgh"]}
    yield (
        "patterns in a row",
        _object(**{f"x{i}": {"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(40)}),
    )


def _products() -> Named:
    def choice(index: int, count: int, keyword: str = "anyOf") -> dict[str, Any]:
        return {keyword: [_object(**{f"k{index}": {"const": c}}) for c in range(count)]}

    for keyword in ("anyOf", "oneOf"):
        yield f"2 to the 20 of {keyword}", {"allOf": [choice(i, 2, keyword) for i in range(20)]}
        yield f"10 to the 6 of {keyword}", {"allOf": [choice(i, 10, keyword) for i in range(6)]}
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(12):
        nested = {"anyOf": [nested, _object(x=nested)]}
    yield "anyOf in anyOf", nested
    yield "3,000 of allOf", {"allOf": [{"type": "object"}] * 3000}
    yield "3,000 of anyOf", {"anyOf": [_object(**{f"x{i}": {"type": "string"}}) for i in range(3000)]}
    yield "overlapping oneOf", {"oneOf": [{"type": "string", "minLength": i} for i in range(100)]}
    yield (
        "300 optional properties",
        {"type": "object", "properties": {f"x{i}": {"type": "integer"} for i in range(300)}},
    )
    yield "types of anyOf", {"anyOf": [{"type": ["string", "number", "null", "array", "object", "boolean"]}] * 50}


def _references() -> Named:
    yield "self", {"$ref": "#"}
    yield "cycle of two", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ring = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 500}"} for i in range(500)}
    yield "cycle of 500", {"$ref": "#/$defs/d0", "$defs": ring}
    yield (
        "required tree",
        {"$ref": "#/$defs/t", "$defs": {"t": _object(left={"$ref": "#/$defs/t"}, right={"$ref": "#/$defs/t"})}},
    )
    yield "allOf of itself", {"allOf": [{"$ref": "#"}]}
    yield "anyOf of itself", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    yield "not of itself", {"not": {"$ref": "#"}}
    for keyword in ("allOf", "anyOf", "oneOf"):
        doubling = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
        yield f"2 to the 40 by {keyword}", {"$ref": "#/$defs/d0", "$defs": {**doubling, "d40": {"type": "integer"}}}
    tree = {f"d{i}": _object(x={"$ref": f"#/$defs/d{i + 1}"}, y={"$ref": f"#/$defs/d{i + 1}"}) for i in range(40)}
    yield "2 to the 40 by properties", {"$ref": "#/$defs/d0", "$defs": {**tree, "d40": {"type": "integer"}}}
    for url in ("http://169.254.169.254/latest/meta-data", "https://example.com/schema.json", "file:///etc/passwd",
                "http://localhost:1/", "urn:example:nowhere", "#/$defs/missing", "#/%00", "../../etc/passwd",
                "http://json-schema.org/draft-07/schema#", "#anchor", "a" * 50_000):  # fmt: skip
        yield f"$ref {url[:40]}", {"$ref": url}
    yield (
        "$id elsewhere",
        {"$id": "http://127.0.0.1:1/", "$ref": "other", "$defs": {"other": {"$id": "other", "type": "null"}}},
    )
    yield "$dynamicRef", {"$dynamicAnchor": "node", "type": "object", "properties": {"x": {"$dynamicRef": "#node"}}}
    yield "$recursiveRef", {"$recursiveAnchor": True, "properties": {"x": {"$recursiveRef": "#"}}}
    yield "unknown $schema", {"$schema": "http://127.0.0.1:1/draft", "type": "string"}


def _depths() -> Named:
    for depth in (40, 99, 1000, 10_000):
        text = '{"type":"array","items":' * depth + "{}" + "}" * depth
        yield f"items {depth} deep", text.encode()
    for depth in (30, 45):
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            schema = _object(x=schema)
        yield f"properties {depth} deep", schema
    for keyword, depth in (("not", 90), ("not", 91)):
        schema = {"type": "integer"}
        for _ in range(depth):
            schema = {keyword: schema}
        yield f"{keyword} {depth} deep", schema


def _enums(numbers: random.Random) -> Named:
    words = ["".join(numbers.choices("abcdefgh", k=numbers.randint(3, 12))) for _ in range(5000)]
    yield "enum of 5,000 words", {"enum": words}
    yield "enum of 20,000 words", {"enum": words * 4}
    yield "enum with a common prefix", {"enum": ["a" * 200 + str(i) for i in range(400)]}
    yield "enum of numbers", {"enum": [numbers.uniform(-1e9, 1e9) for _ in range(4000)]}
    yield "enum of prefixes", {"enum": ["a" * i for i in range(1, 400)]}
    yield "enum of objects", {"enum": [{f"k{i}": [i] * 3} for i in range(2000)]}
    yield "const of 90,000 characters", {"const": "x" * 90_000}
    yield "const of control characters", {"const": "".join(map(chr, range(32))) * 20}
    yield "enum of emoji", {"enum": ["\U0001f600" * i for i in range(1, 200)]}


def _overlaps() -> Named:
    yield "patternProperties overlap", {
        "type": "object", "patternProperties": {f"^.*{c}.*$": {"minimum": i} for i, c in enumerate("abcdefghij")},
    }  # fmt: skip
    yield "patternProperties catastrophic", {"type": "object", "patternProperties": {"(a+)+$": {}, "((a|b)*)*c": {}}}
    yield "patternProperties by the hundred", {
        "type": "object", "patternProperties": {f"^x{{{i}}}": {"type": "string"} for i in range(200)},
        "additionalProperties": False,
    }  # fmt: skip
    yield "patternProperties and properties", {
        "type": "object", "properties": {"ab": {"type": "string"}}, "patternProperties": {"a.": {"type": "integer"}},
        "required": ["ab"],
    }  # fmt: skip
    yield "patternProperties of no pattern", {"type": "object", "patternProperties": {"(": {}}}
    yield "propertyNames", {"type": "object", "propertyNames": {"pattern": "(a|aa)+"}, "minProperties": 1000}
    yield "contains", {"type": "array", "contains": {"const": 1}, "minContains": 10**6, "maxContains": 10**9}
    yield "uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1000, "uniqueItems": True}
    yield "prefixItems", {"type": "array", "prefixItems": [{"const": i} for i in range(3000)], "items": False}
    for name in _FORMATS:
        yield f"format {name}", {"type": "string", "format": name, "minLength": 1000, "maxLength": 2000}


def _conditions() -> Named:
    a = {"properties": {"a": {"const": 1}}}
    yield "if then else", {"if": a, "then": {"required": ["b"]}, "else": {"required": ["c"]}}
    chain: dict[str, Any] = {"type": "object"}
    for index in range(40):
        chain = {"if": {"required": [f"x{index}"]}, "then": chain, "else": {"type": "object"}}
    yield "40 of if then", chain
    yield "then without if", {"then": {"type": "integer"}, "else": {"type": "string"}}
    yield "not everything", {"not": {}}
    yield "not a type", {"not": {"type": ["string", "number", "boolean", "null"]}}
    yield "not of anyOf", {"not": {"anyOf": [{"const": i} for i in range(2000)]}}
    yield "not a pattern", {"type": "string", "not": {"pattern": "(a|b)*c(a|b){20}"}}
    yield "dependentRequired", {"dependentRequired": {f"x{i}": [f"x{i + 1}"] for i in range(500)}}
    yield "dependentSchemas", {"dependentSchemas": {f"x{i}": {"$ref": "#"} for i in range(200)}}
    yield "dependencies", {"dependencies": {"a": ["b"], "b": {"required": ["a"]}}}
    yield "unevaluatedProperties", {"allOf": [a, {"properties": {"b": {}}}], "unevaluatedProperties": False}
    yield "unevaluatedItems", {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": {"$ref": "#"}}


def _contradictions() -> Named:
    yield "minimum over maximum", {"type": "integer", "minimum": 10, "maximum": 1}
    yield "minLength over maxLength", {"type": "string", "minLength": 10, "maxLength": 1}
    yield "minItems over maxItems", {"type": "array", "minItems": 10, "maxItems": 1}
    yield "two types", {"allOf": [{"type": "string"}, {"type": "integer"}]}
    yield "two constants", {"allOf": [{"const": 1}, {"const": 2}]}
    yield "required but false", {"type": "object", "properties": {"a": False}, "required": ["a"]}
    yield (
        "required but additional",
        {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
    )
    yield "empty enum", {"enum": []}
    yield "no multiple in bounds", {"type": "integer", "multipleOf": 1000, "minimum": 1, "maximum": 999}
    yield "negative length", {"type": "string", "minLength": -5}


def _no_schemas() -> Named:
    for name, value in {
        "true": True, "a list": [], "a number": 1, "a text": "string", "null": None, "type 5": {"type": 5},
        "no type": {"type": []}, "unknown type": {"type": "nothing"}, "a list of properties": {"properties": []},
        "required as text": {"type": "object", "required": "a"}, "enum as text": {"enum": "a"}, "items as number": {"items": 5},
        "anyOf as object": {"anyOf": {}}, "empty anyOf": {"anyOf": []}, "$ref as number": {"$ref": 5},
        "maximum as text": {"type": "integer", "maximum": "5"}, "x-guidance": {"x-guidance": {"whitespace_pattern": "(a+)+"}},
        "NUL": {"type": "string", "pattern": "\0", "title": "\0"}, "50,000 unknown words": {f"x{i}": 1 for i in range(5000)},
    }.items():  # fmt: skip
        yield f"no schema: {name}", value
