"""Checks that a completion is strict JSON, follows a JSON Schema or equals the reference, and locates what does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import InputError
from .fences import Block, fenced_blocks
from .json_reading import Fault, Node, differences, read_json, read_value
from .verdict import Sample, Span, Verdict

__all__ = ["JsonSchema", "extract_json"]

Policy = Literal["whole", "whole_or_fence", "fence", "object"]
_POLICIES = ("whole", "whole_or_fence", "fence", "object")
_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_LANGUAGES = ("json", "")
_MAX_SPANS = 100
_MISSING = ("required", "dependentRequired", "dependencies", "minProperties", "minItems", "contains")
_BEGUN = re.compile(r'\{[ \t\n\r]*+"(?:[^"\\\n]|\\.)*+"[ \t\n\r]*+:')
_OPENING = re.compile(r"\s*+(?:`{3}|~{3})[^\n]*\n?")


@dataclass(frozen=True)
class JsonSchema:
    """1 where the completion is strict JSON that fits the schema (and equals the reference, if asked), else 0.

    "Strict" is what :func:`apportion.verifiers.json_reading.read_json` takes: no NaN, no duplicate keys, no trailing
    comma. Without a schema and ``match_reference`` that alone is judged. With ``match_reference`` the verdict is an
    abstention where the sample's reference is missing or no JSON; numbers are compared by value (1 is 1.0, not true).

    A right answer gets one span of score 1; else what is at fault gets spans of score 0 (at most 100):

    - where the text stops being JSON; where it ends too soon, an empty span, which falls on the end token;
    - a value that breaks the schema or differs from the reference: the value;
    - a property that is missing: the closing brace that stands in its place, and not the members that are there;
    - a property or item too many: with its key, or from the first such item on.

    Extraction takes only what leaves no doubt. A ``$ref`` to another server is refused at once and never fetched.
    Patterns of the schema run on the model's text with Python's ``re``, and ``uniqueItems`` compares every pair of
    mixed items: a pattern such as ``^(a+)+$`` can be made to run for hours. Where the schema has one, put the verifier
    into a process that can be killed: :mod:`apportion.verifiers.isolated`.

    Args:
        schema: a JSON Schema, or the path of a file with one; null only reads the JSON.
        extract: see :func:`extract_json`.
        match_reference: the value must equal the sample's reference, a JSON text.
        partial: the score is the share of the required properties at the top level that are there and right, with one
            more to lose where anything else is wrong; needs a schema that requires properties.
        formats: whether ``format`` is checked ("date", "email"); a format the library cannot check is refused.
        draft: of the schema where it has no ``$schema``: draft4, draft6, draft7, draft2019-09 or draft2020-12.

    >>> schema = {"properties": {"age": {"type": "integer"}}, "required": ["age", "name"]}
    >>> text = '{"age": "five"}'
    >>> verdict, = JsonSchema(schema)([Sample("", text)])
    >>> verdict.score, [(text[span.start : span.stop], span.label) for span in verdict.spans]
    (0.0, [('"five"', "'five' is not of type 'integer'"), ('}', "'name' is a required property")])
    """

    schema: Mapping[str, Any] | str | None = None
    extract: Policy = "whole"
    match_reference: bool = False
    partial: bool = False
    formats: bool = False
    draft: str = "draft2020-12"
    _source: str = field(init=False, repr=False, compare=False, default="")  # the schema as JSON; "" for none

    def __post_init__(self) -> None:
        if self.extract not in _POLICIES:
            raise InputError(f"extract: {self.extract!r} is no policy; give one of {', '.join(_POLICIES)}")
        if self.draft not in _DRAFTS:
            raise InputError(f"draft: {self.draft!r} is unknown; give one of {', '.join(_DRAFTS)}")
        if self.schema is not None:
            object.__setattr__(self, "_source", _schema_text(self.schema))
            _validator(self._source, self.draft, self.formats)
        if self.partial and not self._required():
            raise InputError("partial: the schema requires no properties at its top level; give 'required' there")

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        wanted = read_json(sample.reference or "") if self.match_reference else None
        if isinstance(wanted, Fault):
            return Verdict(None)
        found = extract_json(sample.completion, self.extract)
        if isinstance(found, Fault):
            return Verdict(0.0, (Span(found.start, found.stop, 0.0, found.reason),))
        faults = [*self._schema_faults(found)]
        if wanted is not None:
            faults += (_Fault(*fault, frozenset({top})) for fault, top in differences(found, wanted))
        if not faults:
            return Verdict(1.0, (Span(found.start, found.stop, 1.0, "valid"),))
        return Verdict(_share(found.value, self._required(), faults) if self.partial else 0.0, _spans(faults))

    def _schema_faults(self, found: Node) -> Iterator[_Fault]:
        if not self._source:
            return
        errors = _validator(self._source, self.draft, self.formats).iter_errors(found.value)
        for error in errors if self.partial else islice(errors, _MAX_SPANS):
            path = tuple(error.absolute_path)
            tops = frozenset(path[:1] or (error.validator_value if error.validator == "required" else {None}))
            tops -= found.value.keys() if not path and isinstance(found.value, dict) else set()
            for start, stop in _places(found.at(path), error):
                yield _Fault(start, stop, _one_line(error.message), tops)

    def _required(self) -> list[str]:
        """Names of the properties that the schema requires at its top level."""
        required = json.loads(self._source or "{}").get("required")
        return required if isinstance(required, list) else []


def extract_json(text: str, policy: Policy = "whole") -> Node | Fault:
    """The JSON value of a completion by the named policy, with places in the completion; or what is wrong.

    - ``whole``: the text is the value, with nothing around it but blanks, tabs and line breaks; a fence is refused;
    - ``whole_or_fence``: the same, or one fenced block, marked "json" or not at all, with nothing around it;
    - ``fence``: the content of the fenced block, whatever stands around it. Of several, those marked "json" count, or
      else those not marked, and all that count must hold the same value;
    - ``object``: the only object in the text. Equal ones are one; different ones, or one that begins like an object
      and is malformed, leave a doubt, and the text is at fault. Braces without a key, as in prose, are passed over.

    >>> extract_json('{"score": 1}, again {"score": 1.0}', "object").value
    {'score': 1}
    >>> extract_json('{"score": 0} or {"score": 1}', "object")
    Fault(start=16, stop=28, reason='another value than the first: ambiguous')
    """
    if policy == "object":
        return _only(_objects(text), "no JSON object", text)
    if policy == "fence":
        blocks = [block for block in fenced_blocks(text) if block.language in _LANGUAGES]
        marked = [block for block in blocks if block.language]
        return _only((_block(text, block) for block in marked or blocks), "no fenced JSON", text)
    blocks = fenced_blocks(text) if policy == "whole_or_fence" else []
    if not blocks or blocks[0].language not in _LANGUAGES or not _OPENING.fullmatch(text, 0, blocks[0].start):
        return read_json(text)
    found = _block(text, blocks[0])
    _, _, rest = text[blocks[0].stop :].partition("\n")
    if isinstance(found, Node) and rest.strip():
        start = len(text) - len(rest.lstrip())
        return Fault(start, start + len(rest.strip()), "text behind the fence")
    return found


class _Fault(NamedTuple):
    """What is wrong with a value; ``tops`` are the properties at the top level that it spoils, None for the whole."""

    start: int
    stop: int
    label: str
    tops: frozenset[str | int | None]


def _objects(text: str) -> Iterator[Node | Fault]:
    at = text.find("{")
    while at >= 0:
        found = read_value(text, at)
        if isinstance(found, Node) or _BEGUN.match(text, at):
            yield found
        at = text.find("{", max(found.stop, at + 1) if isinstance(found, Node) else at + 1)


def _block(text: str, block: Block) -> Node | Fault:
    found = read_json(text, block.start, block.stop)
    if isinstance(found, Node) and not block.closed:
        return Fault(len(text), len(text), "the fence is not closed")
    return found


def _only(found: Iterable[Node | Fault], none: str, text: str) -> Node | Fault:
    """The one value that all are, or the first doubt."""
    first: Node | None = None
    for node in found:
        if isinstance(node, Fault):
            return node
        if first is not None and any(True for _ in differences(node, first)):
            return Fault(node.start, node.stop, "another value than the first: ambiguous")
        first = first or node
    return first or Fault(0, len(text), none)


def _places(node: Node, error: Any) -> list[tuple[int, int]]:
    """Where in a value the schema is broken: at the value itself, unless something is missing in it or too much."""
    rule, schema, parts = error.validator, error.schema, node.parts
    places: list[tuple[int, int]] = []
    if parts is not None and rule in _MISSING:
        places = [(node.stop - 1, node.stop)]
    elif parts is not None and rule is None:  # the schema "false" of a part, to which jsonschema gives no path
        inner = parts.values() if isinstance(parts, dict) else parts
        places = [(part.start, part.stop) for part in inner if part.value is error.instance]
    elif isinstance(parts, dict) and isinstance(error.instance, str):  # propertyNames judges keys as if values
        places = [part.key for name, part in parts.items() if name == error.instance and part.key]
    elif isinstance(parts, dict) and rule == "additionalProperties":
        known, patterns = schema.get("properties", {}), "|".join(schema.get("patternProperties", {}))
        names = (name for name in parts if name not in known)
        places = [parts[name].member for name in names if not (patterns and re.search(patterns, name))]
    elif isinstance(parts, list) and rule in ("maxItems", "items", "additionalItems"):
        fixed = schema.get("prefixItems", schema.get("items"))
        allowed = error.validator_value if rule == "maxItems" else len(fixed) if isinstance(fixed, list) else 0
        places = [(part.start, parts[-1].stop) for part in parts[int(allowed) :][:1]]
    return places or [(node.start, node.stop)]


def _share(value: object, required: Sequence[str], faults: Sequence[_Fault]) -> float:
    """Right ones among the required properties, and one more to lose where anything else is wrong."""
    spoilt = frozenset[str | int | None]().union(*(fault.tops for fault in faults))
    right = [name for name in required if isinstance(value, dict) and name in value and name not in spoilt]
    return len(right) / (len(required) + (not spoilt <= set(required)))


def _spans(faults: Sequence[_Fault]) -> tuple[Span, ...]:
    """One span for each place, in order."""
    labels: dict[tuple[int, int], list[str]] = {}
    for fault in faults:
        labels.setdefault((fault.start, fault.stop), []).append(fault.label)
    places = sorted(labels.items())[:_MAX_SPANS]
    return tuple(Span(*place, 0.0, _one_line("; ".join(dict.fromkeys(label)))) for place, label in places)


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    line = line if len(line) <= 120 else f"{line[:119]}…"
    return "".join(char if char.isprintable() else "?" for char in line)


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    """The schema, or the file that holds it, as JSON."""
    if isinstance(schema, str):
        try:
            text = Path(schema).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise InputError(f"schema: {schema!r} cannot be read ({type(error).__name__}); give a JSON file") from error
        found = read_json(text, max_depth=200)
        if isinstance(found, Fault):
            line = text.count("\n", 0, found.start) + 1
            raise InputError(f"schema: {schema!r}, line {line}: {found.reason}; mend the file")
        schema = found.value
    if not isinstance(schema, Mapping):
        raise InputError(f"schema: a JSON Schema is an object, not {type(schema).__name__}")
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"schema: it cannot be written as JSON: {_one_line(str(error))}") from error


@lru_cache(maxsize=64)
def _validator(source: str, draft: str, formats: bool) -> Any:
    """A validator of jsonschema that is sure to work without a network. Kept out of the verifier, which pickles so."""
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise InputError("schema: needs the jsonschema library; pip install 'apportion[json]'") from error
    schema = json.loads(source)
    dialect = schema.get("$schema", _DRAFTS[draft])
    if str(dialect).rstrip("#") not in {known.rstrip("#") for known in _DRAFTS.values()}:
        raise InputError(f"schema: its $schema {dialect!r} is unknown; give one of {', '.join(_DRAFTS.values())}")
    kind: Any = validator_for({"$schema": dialect})
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise InputError(f"schema: at {error.json_path}: {_one_line(error.message)}; mend the schema") from error
    checker = kind.FORMAT_CHECKER if formats else None
    _check_references(schema, dialect, set(checker.checkers) if checker else None)
    return kind(schema, registry=REGISTRY, format_checker=checker)


def _check_references(schema: Mapping[str, Any], dialect: str, formats: set[str] | None) -> None:
    """Refuse a reference that leads nowhere without a network, and a format that nothing checks."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(dialect)
    root = specification.create_resource(schema)
    waiting: list[tuple[Any, Any]] = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    while waiting:
        resource, resolver = waiting.pop()
        contents = resource.contents
        if not isinstance(contents, Mapping) or id(contents) in seen:
            continue
        seen.add(id(contents))
        if formats is not None and contents.get("format", "") not in {"", *formats}:
            raise InputError(
                f"formats: the library cannot check {contents['format']!r}, only {', '.join(sorted(formats))}; "
                "pip install 'jsonschema[format-nongpl]' or give formats=false"
            )
        reference = contents.get("$ref")
        if isinstance(reference, str):
            try:
                resolved = resolver.lookup(reference)
            except Unresolvable as error:
                raise InputError(
                    f"schema: $ref {reference!r} leads nowhere; put it under $defs, for nothing is fetched"
                ) from error
            waiting.append((specification.create_resource(resolved.contents), resolved.resolver))
        waiting += [(part, resolver.in_subresource(part)) for part in resource.subresources()]
