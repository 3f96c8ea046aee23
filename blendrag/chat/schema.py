"""Answers that are held to JSON schemas, and end before their tokens do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blendrag.engine.client.generation import Grammar
from blendrag.errors import ConfigError

# Few answers have fewer characters to a token.
_CHARACTERS_PER_TOKEN = 2
_MIN_CHARACTERS = 16
_TOKENS_PER_LEVEL = 32
_MAX_LEVELS = 8
_LONGEST_TOKENS = 1 << 17
_DECIDED = ("enum", "const", "pattern")
_ALONE = {*_DECIDED, "maxLength", "minLength"}  # keywords beside which no grammar holds to a pattern
_CLOCK = r"^[^.]*(\.[0-9]{1,6}([^0-9].*)?)?$"
_DIGITS = {  # of formats that allow any number of them
    "date-time": _CLOCK,
    "duration": r"^([A-Z]+[0-9]{1,6})+[A-Z]$",
    "time": _CLOCK,
}
_BOUNDED = frozenset({"date", "ipv4", "ipv6", "uuid"})  # formats
_VERSIONS = {  # pydantic's formats of UUIDs of one kind
    f"uuid{n}": rf"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{n}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
    for n in range(1, 9)
}
_FRACTION = 1e-10  # the smallest that grammars know

# Keywords whose values are schemas: one or several, or several by name.
_SCHEMAS = frozenset(
    {
        "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else",
        "if", "items", "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties",
    }
)  # fmt: skip
_NAMED = frozenset({"dependentSchemas", "patternProperties", "properties"})
JOINTS = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords whose schemas describe the same value as those beside them."""
OWN = ("additionalProperties", "patternProperties", "properties", "required")
"""Keywords that describe an object."""

_EVALUATING = frozenset({*JOINTS, "additionalProperties", "dependentSchemas", "else", "if", "then"})

# Keywords that name a schema, or a place in it: not needed once its references are resolved.
_NAMES = frozenset({"$anchor", "$defs", "$dynamicAnchor", "$id", "$schema", "definitions", "id"})
_LARGEST = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}  # and their signs
_LARGEST_NUMBER = 2**53  # grammars know no range that reaches further
_COUNTS = (("minItems", "maxItems"), ("minProperties", "maxProperties"))
_NULLABLE = ("const", "default", "examples")  # any other keyword that is null counts as absent
_FORMATS = frozenset(  # those that llguidance knows; to JSON schema all others are annotations
    {*_BOUNDED, *_DIGITS, "email", "hostname", "uri"}
)

# JSON as models have mostly read it. Small ones get lost in white space that they may choose.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_grammar(schema: Mapping[str, Any], max_tokens: int | None) -> Grammar:
    """Return the grammar of answers that match ``schema`` within ``max_tokens``. Raises ConfigError as
    :meth:`Schemas.own` does."""
    schemas = Schemas(max_tokens)
    return schemas.grammar(schemas.own(schema, "the schema"))


class Schemas:
    """Several schemas that become one grammar, for answers within ``max_tokens``; None: as long as any.

    References mean what they mean in their own schema: what they lead to stands among common definitions,
    under a name that no other has. Nothing is fetched.
    """

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens or _LONGEST_TOKENS
        self._definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._found: list[Any] = []  # kept, so that no other object has their identity

    def own(self, schema: Mapping[str, Any], owner: str) -> dict[str, Any]:
        """Return ``schema`` with references to the common definitions. owner: whose it is, for errors.

        Raises ConfigError for a reference to something that is not in the schema, and for what no answer
        matches or no grammar can hold one to.
        """
        from referencing import Registry, Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        own: dict[str, Any] = {}
        try:
            root = Resource.from_contents(dict(schema), default_specification=DRAFT202012)
            resolved = self._resolved(root.contents, Registry().resolver_with_root(root))
            if resolved is False:
                raise ConfigError("nothing matches it, or only multiples of negative numbers")
            own = resolved
            reason = _refusal(self._closed(own))
            if reason is not None:
                for name, definition in self._definitions.items():
                    self._definitions[name] = self._narrowed(definition)
                own = self._narrowed(own)
                reason = _refusal(self._closed(own))
            if reason is None and not _ends(own, self._ending()):
                reason = "only what has no end matches it"
        except Unresolvable as error:
            reason = f"it refers to {error.ref!r}, which is not in it"
        except ConfigError as error:
            reason = str(error)
        except RecursionError:
            reason = "it is nested too deeply"
        except Exception as error:  # what is no schema fails in many ways
            reason = f"it is no JSON schema ({type(error).__name__}: {error})"
        if reason is not None:
            raise ConfigError(f"no answer can be held to {owner}: {reason}")
        return own

    def grammar(self, *alternatives: Mapping[str, Any]) -> Grammar:
        """Return the grammar of answers that match one of several schemas of :meth:`own`."""
        own = dict(alternatives[0]) if len(alternatives) == 1 else {"anyOf": list(alternatives)}
        whole = self._closed(own)
        roomy = with_room(whole, self._max_tokens)
        return Grammar("json", {**(whole if _refusal(roomy) else roomy), "x-guidance": _LAYOUT})

    def _narrowed(self, schema: Any) -> Any:
        """Return a schema without the alternatives that no grammar holds, as long as it has others."""
        if not isinstance(schema, Mapping):
            return schema
        made = _mapped(schema, lambda _, inner: self._narrowed(inner))
        held = [one for one in made.get("anyOf", ()) if _refusal(self._closed({"allOf": [one]})) is None]
        return {**made, "anyOf": held} if held else made

    def _closed(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {**schema, **({"$defs": self._definitions} if self._definitions else {})}

    def _resolved(self, schema: Any, resolver: Any) -> Any:
        from referencing.jsonschema import DRAFT202012

        if not isinstance(schema, Mapping):
            return schema
        if isinstance(schema.get("$id"), str):
            resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
        kept = {
            keyword: value
            for keyword, value in schema.items()
            if keyword not in _NAMES and (value is not None or keyword in _NULLABLE)
        }
        if kept.get("not") in ({}, True):  # as Zod says that there is nothing
            return False
        if kept.pop("nullable", False) is True:  # of OpenAPI 3.0
            kept = {"anyOf": [kept, {"type": "null"}]}
        made = _without_idle(_mapped(kept, lambda _, inner: self._resolved(inner, resolver)))
        if isinstance(made.get("$ref"), str):
            made["$ref"] = f"#/$defs/{self._name(made['$ref'], resolver.lookup(made['$ref']))}"
        if isinstance(made.get("propertyNames"), Mapping):
            made = self._named(made)
        # Grammars know no negative multiples: of numbers on both sides of zero, they have those above it.
        kinds = _types(made)
        below = made.get("maximum", 0) < 0 or made.get("exclusiveMaximum", 1) <= 0
        if made.get("multipleOf") == 1 and kinds & {"integer", "number"} == {"integer"}:
            del made["multipleOf"]
        elif "multipleOf" in made and below and kinds and kinds <= {"integer", "number"}:
            return False
        known = _VERSIONS.get(made.pop("format")) if made.get("format", "date") not in _FORMATS else None
        if known and made.keys().isdisjoint(_ALONE):
            made["pattern"] = known
        for bound, sign in _LARGEST.items():
            if sign * made.get(bound, 0) > _LARGEST_NUMBER:
                made[bound] = sign * _LARGEST_NUMBER
        for least, most in _COUNTS:  # a grammar grows with them
            if made.get(least, 0) > self._max_tokens:
                raise ConfigError(
                    f"{least} {made[least]} is more than {self._max_tokens} tokens have room for"
                )
            if most in made:
                made[most] = min(made[most], max(made.get(least, 0), self._max_tokens))
        return made

    def _named(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with properties in place of what their names match, which grammars do not know:
        pydantic's dictionaries have that. Numbers are names as JSON writes them."""
        named = schema["propertyNames"]
        named = self._definitions.get(_definition(named), named)
        names = named.get("enum", [named["const"]] if "const" in named else [])
        names = [str(name) if type(name) is int else name for name in names]
        more = named.keys() - {"const", "description", "enum", "format", "title", "type"}
        if not names and not _types(named) <= {"string"}:
            return schema
        made = {name: value for name, value in schema.items() if name != "propertyNames"}
        if not names and not more:
            return made
        others = schema.get("additionalProperties", True)
        pattern = _pattern_of({name: named[name] for name in more})
        if not names and pattern and not {"patternProperties", "properties", "required"} & schema.keys():
            return {**made, "patternProperties": {pattern: others}, "additionalProperties": False}
        if not names or more or not all(isinstance(name, str) for name in names):
            return schema
        if "patternProperties" in schema or {*schema.get("required", ())} - {*names}:
            return schema
        known = schema.get("properties", {})
        made["properties"] = {name: known.get(name, others) for name in names}
        return {**made, "additionalProperties": False}

    def _name(self, reference: str, found: Any) -> str:
        place = id(found.contents)
        if place not in self._names:
            base = name = re.sub(r"\W", "", reference.rpartition("/")[2], flags=re.ASCII) or "root"
            times = 1
            while name in self._definitions:
                times += 1
                name = f"{base}_{times}"
            self._names[place] = name
            self._found.append(found.contents)
            self._definitions[name] = {}  # it may refer to itself
            self._definitions[name] = self._resolved(found.contents, found.resolver)
        return self._names[place]

    def _ending(self) -> set[str]:
        """Return the names of definitions that something finite matches."""
        ending: set[str] = set()
        while more := {
            name for name, schema in self._definitions.items() if name not in ending and _ends(schema, ending)
        }:
            ending |= more
        return ending


def _without_idle(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without keywords that say nothing, or in words that a grammar knows."""
    made = dict(schema)
    if isinstance(made.get("type"), str):
        made["type"] = made["type"].lower()  # Gemini's are in capitals
    for bound in ("exclusiveMaximum", "exclusiveMinimum"):
        if isinstance(made.get(bound), bool):  # of OpenAPI 3.0
            del made[bound]
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if made.get("propertyNames") in (True, {}, {"type": "string"}):
        del made["propertyNames"]
    if "unevaluatedProperties" in made and not made.keys() & _EVALUATING:
        made.setdefault("additionalProperties", made.pop("unevaluatedProperties"))
    return made


def _ends(schema: Any, ending: set[str]) -> bool:
    """Return whether something finite matches a schema. ending: names of definitions that something does."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "$ref" in schema and _definition(schema) not in ending:
        return False
    if not all(_ends(one, ending) for one in schema.get("allOf", ())):
        return False
    if not all(any(_ends(one, ending) for one in schema.get(name, (True,))) for name in ("anyOf", "oneOf")):
        return False
    types = _types(schema)
    if types == {"object"}:
        properties = schema.get("properties", {})
        return all(_ends(properties.get(name), ending) for name in schema.get("required", ()))
    if types == {"array"} and schema.get("minItems", 0):
        return _ends(schema.get("items"), ending)
    return True


def _refusal(schema: Mapping[str, Any]) -> str | None:
    """Return why the engine's grammars refuse a schema; None also where none are installed."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        return None
    try:
        return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(dict(schema))) or None
    except ValueError as error:
        return str(error)


def with_room(schema: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the schema, closed: what it names is all there is, open strings share ``max_tokens`` equally,
    and digits behind a point end.

    Small models add properties, and go on with a string, or a fraction, until ``max_tokens`` cuts them off;
    what is left is no JSON. Objects that name no properties, or say what others may be, stay as they are; so
    do those that a value has to match together, which, closed each, would leave it nothing. What contains
    itself does so no more often than there is room for. References lead to ``$defs``.
    """
    levels = max(1, min(_MAX_LEVELS, max_tokens // _TOKENS_PER_LEVEL))
    roomy: dict[str, Any] = copy.deepcopy(_unrolled(dict(schema), levels))
    parts: dict[int, tuple[dict[str, Any], bool]] = {}
    _look(roomy, roomy.get("$defs", {}), True, parts)
    for part, apart in parts.values():
        named = part.get("properties")
        alone = apart and not part.keys() & JOINTS
        if alone and named is not None and set(part.get("required", ())) <= set(named):
            part.setdefault("additionalProperties", False)
        if "string" in _types(part) and part.get("format") in _DIGITS:
            part.setdefault("pattern", _DIGITS[part["format"]])
        # Grammars know no negative multiples, nor their exponents, which numbers without bounds may need.
        above = max(part.get("minimum", -1), part.get("exclusiveMinimum", -1)) >= 0
        if "number" in _types(part) and above and part.keys().isdisjoint(_DECIDED):
            part.setdefault("multipleOf", _FRACTION)
    room = _CHARACTERS_PER_TOKEN * max_tokens
    strings = [
        part
        for part, _ in parts.values()
        if "string" in _types(part)
        and part.get("maxLength", room + 1) > room
        and part.get("format") not in _BOUNDED
        and part.keys().isdisjoint(_DECIDED)
    ]
    share = room // max(1, len(strings))
    for string in strings:
        most = max(_MIN_CHARACTERS, share, string.get("minLength", 0))
        string["maxLength"] = min(most, string.get("maxLength", most))
    return roomy


def _unrolled(schema: dict[str, Any], levels: int) -> dict[str, Any]:
    """Return the schema with a definition for each level of those that contain themselves."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    leads = {name: _led_to(one, definitions) for name, one in definitions.items()}
    if not any(name in found for name, found in leads.items()):
        return schema
    made: dict[str, Any] = {}

    def at(part: Any, owner: str, level: int) -> Any:
        """Return the part of a definition at a level; None if nothing matches it there."""
        if not isinstance(part, dict):
            return part
        changed = _mapped(part, lambda _, inner: at(inner, owner, level))
        name = _definition(part)
        if name in leads.get(name, ()):
            within = name in leads.get(owner, ()) and owner in leads[name]
            name = f"{name}.{level + 1 if within else 0}"
            if within and made.get(name) is None:
                return None
            changed["$ref"] = f"#/$defs/{name}"
        return _without_impossible(changed)

    for level in reversed(range(levels)):
        made |= {
            f"{name}.{level}": at(definitions[name], name, level) for name in leads if name in leads[name]
        }
    made |= {name: at(definitions[name], name, 0) for name in leads if name not in leads[name]}
    root = at({name: value for name, value in schema.items() if name != "$defs"}, "", 0)
    if root is None:
        return schema
    return {**root, "$defs": {name: one for name, one in made.items() if one is not None}}


def _without_impossible(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema without inner ones that nothing matches (None); None if nothing matches it."""
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties"):
            made[keyword] = {name: False if inner is None else inner for name, inner in value.items()}
            if keyword == "properties" and any(
                value.get(one, True) is None for one in schema.get("required", ())
            ):
                return None
        elif keyword in ("anyOf", "oneOf"):
            made[keyword] = [inner for inner in value if inner is not None]
            if not made[keyword]:
                return None
        elif keyword in ("allOf", "prefixItems") and None in value:
            return None
        elif keyword == "items" and value is None:
            if schema.get("minItems"):
                return None
            made |= {"items": True, "maxItems": 0}
        elif keyword in _SCHEMAS and value is None:
            made[keyword] = False
    return made


def _led_to(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of the definitions that a schema's references lead to, and theirs."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [inner for _, inner in _inner(part)]
            name = _definition(part)
            if name in definitions and name not in found:
                found.add(name)
                waiting.append(definitions[name])
    return found


def _look(
    schema: Any, definitions: Mapping[str, Any], apart: bool, seen: dict[int, tuple[dict[str, Any], bool]]
) -> None:
    """Note every schema that is reached from one, and whether those inside describe their values alone."""
    if not isinstance(schema, dict):
        return
    joints = schema.keys() & JOINTS
    if len(joints) > 1 or (joints and schema.keys() & OWN):
        apart = False
    if id(schema) in seen and (apart or not seen[id(schema)][1]):
        return
    seen[id(schema)] = schema, apart
    for keyword, part in _inner(schema):
        _look(part, definitions, apart and (keyword != "allOf" or len(schema["allOf"]) == 1), seen)
    _look(definitions.get(_definition(schema)), definitions, apart, seen)


def _definition(schema: Mapping[str, Any]) -> str:
    """Return the name of the definition that a schema refers to, if it does."""
    return str(schema.get("$ref", "")).removeprefix("#/$defs/")


def _types(schema: Mapping[str, Any]) -> set[Any]:
    named = schema.get("type", ())
    return {named} if isinstance(named, str) else set(named)


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """Return the pattern of texts that have one, or a length; None of others."""
    if names.keys() <= {"maxLength", "minLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return names["pattern"] if names.keys() == {"pattern"} else None


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas right inside of one, each with its keyword."""
    found: list[tuple[str, Any]] = []
    _mapped(schema, lambda keyword, inner: found.append((keyword, inner)))
    yield from found


def _mapped(schema: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a schema with ``change`` made to each inner one, of its keyword and itself."""
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, Mapping):
            made[keyword] = {name: change(keyword, inner) for name, inner in value.items()}
        elif keyword in _SCHEMAS and isinstance(value, list | tuple):
            made[keyword] = [change(keyword, inner) for inner in value]
        elif keyword in _SCHEMAS:
            made[keyword] = change(keyword, value)
    return made
