#!/usr/bin/env python3
"""Writes suite.json: groups of the JSON Schema Test Suite, draft 2020-12, for tests/grammars.rs.

usage: generate.py SUITE > suite.json

SUITE is the folder `json/tests/draft2020-12` in the source distribution of jsonschema 4.26.0 on the Python
package index: pip download --no-deps --no-binary :all: jsonschema==4.26.0
"""
import json
import sys
from pathlib import Path

FILES = """
    additionalProperties allOf anyOf boolean_schema const contains default dependentRequired enum
    exclusiveMaximum exclusiveMinimum if-then-else items maxItems maxLength maxProperties maximum minItems
    minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems properties
    propertyNames ref required type unevaluatedItems unevaluatedProperties uniqueItems
""".split()
# Names of parts of a schema. Here `$ref` is a path from the root.
NAMES = ("$id", "$anchor", "$dynamicAnchor", "$dynamicRef")


def members(value):
    """Every member of every object in a value."""
    if isinstance(value, dict):
        yield from value.items()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from members(part)


def is_path(reference):
    return reference == "#" or (reference.startswith("#/") and not set('~%"') & set(reference))


def included(schema):
    every = list(members(schema))
    references = [value for name, value in every if name == "$ref" and isinstance(value, str)]
    return all(map(is_path, references)) and not any(name in NAMES for name, _ in every)


def text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def main(suite):
    groups = []
    for file in FILES:
        for group in json.loads((suite / f"{file}.json").read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema.pop("$schema", None)
            if included(schema):
                # Texts, because the same number has several.
                tests = [[text(test["data"]), test["valid"]] for test in group["tests"]]
                groups.append(text([file, group["description"], schema, tests]))
    print("[" + ",\n".join(groups) + "]")


main(Path(sys.argv[1]))
