"""JSON that fits a schema or equals a reference, and the places where it does not."""

import json
import pickle
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.credit.align import spans_to_tokens
from apportion.verifiers import InputError, Sample
from apportion.verifiers.json_reading import Node
from apportion.verifiers.json_schema import JsonSchema, extract_json
from apportion.verifiers.panel import judge

pytest.importorskip("jsonschema")

law = settings(derandomize=True, deadline=None, max_examples=100)
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
soup = st.lists(
    st.sampled_from(["{", "}", '"a"', ":", "1", ",", "[", "]", "```json", "```", "\n", " ", "x"]), max_size=14
)
POLICIES = ["whole", "whole_or_fence", "fence", "object"]
PERSON = {
    "properties": {"age": {"type": "integer"}, "tags": {"items": {"type": "string"}, "maxItems": 2}, "name": {}},
    "required": ["age", "name"],
    "additionalProperties": False,
}


def verdict(text, schema=None, reference=None, **options):
    (it,) = JsonSchema(schema, **options)([Sample("", text, reference)])
    return it


def faults(text, schema=None, reference=None, **options):
    return [text[s.start : s.stop] for s in verdict(text, schema, reference, **options).spans if s.score < 1]


@pytest.mark.parametrize("text", ["5", '"x"', "null", "[]", "true", "", "  ", "None", "{}{}", "﻿{}"])
def test_only_an_object_is_an_object(text):
    assert verdict(text, {"type": "object"}).score == 0.0
    assert verdict(" {}\n", {"type": "object"}).score == 1.0


def test_without_a_schema_only_the_json_is_judged():
    assert [verdict(text).score for text in ("5", "null", "{'a': 1}", '{"a": NaN}', '{"a":1,"a":1}')] == [1, 1, 0, 0, 0]


def test_what_is_right_is_one_span_of_score_1():
    (span,) = verdict(' {"age": 5, "name": "x"} ', PERSON).spans
    assert (span.start, span.stop, span.score, span.label) == (1, 24, 1.0, "valid")


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ('{"age": "five", "name": 1}', ['"five"']),
        ('{"age": 1.5, "name": 1}', ["1.5"]),
        ('{"age": true, "name": 1}', ["true"]),
        ('{"age": 1}', ["}"]),
        ("{}", ["}"]),
        ('{"age": 1, "name": {"x": [1]}, "x": {"y": 1}}', ['"x": {"y": 1}']),
        ('{"x": 0, "age": 1, "y": 0}', ['"x": 0', '"y": 0', "}"]),
        ('{"age": 1, "name": 1, "tags": ["a", 1]}', ["1"]),
        ('{"age": 1, "name": 1, "tags": ["a", "b", "c", "d"]}', ['"c", "d"']),
        ('{"age": 1,}', [","]),
        ('{"age": 1, "name', [""]),
    ],
)
def test_the_offending_value_is_located(text, places):
    assert verdict(text, PERSON).score == 0.0
    assert faults(text, PERSON) == places


@pytest.mark.parametrize(
    ("schema", "text", "places"),
    [
        ({"propertyNames": {"pattern": "^a"}}, '{"ab": {"b": 1}, "b": {"b": 1}}', ['"b"']),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False}, '{"ab": 1, "b": 2}', ['"b": 2']),
        ({"additionalProperties": {"type": "null"}}, '{"a": null, "b": 2}', ["2"]),
        ({"prefixItems": [{}], "items": False}, "[1, 2, 3]", ["2, 3"]),
        ({"items": {"maxItems": 1}}, "[[], [1], [1, 2]]", ["2"]),
        ({"minItems": 3}, "[1]", ["]"]),
        ({"contains": {"type": "string"}}, "[1]", ["]"]),
        ({"uniqueItems": True}, "[1, 1.0]", ["[1, 1.0]"]),
        ({"minProperties": 1}, "{}", ["}"]),
        ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}', ["}"]),
        ({"enum": [1, 2]}, "3", ["3"]),
        ({"enum": [1]}, "true", ["true"]),
        ({"anyOf": [{"type": "null"}, {"properties": {"a": {"type": "null"}}}]}, '{"a": 1}', ['{"a": 1}']),
        ({"properties": {"a": False}}, '{"b": {}, "a": {}}', ["{}"]),
        ({"$defs": {"n": {"type": "null"}}, "items": {"$ref": "#/$defs/n"}}, "[null, 0]", ["0"]),
        ({"multipleOf": 0.1}, "9" * 308, ["9" * 308]),
    ],
)
def test_each_kind_of_fault_has_its_place(schema, text, places):
    assert faults(text, schema) == places


def test_the_place_is_counted_in_the_completion():
    text = 'Result:\n```json\n{"a":1,}\n```'
    assert [(s.start, s.stop) for s in verdict(text, extract="fence").spans] == [(22, 23)]
    crlf = 'Result:\r\n```json\r\n{"a":"x"}\r\n```\r\n'
    (span,) = verdict(crlf, {"properties": {"a": {"type": "null"}}}, extract="fence").spans
    assert (span.start, crlf[span.start : span.stop]) == (23, '"x"')
    emoji = '😀 {"a": "💩", "b": 1}'
    assert faults(emoji, {"properties": {"b": {"type": "null"}}}, extract="object") == ["1"]


def test_where_the_text_ends_too_soon_the_end_token_is_at_fault():
    spans = verdict('{"a": 1').spans
    assert spans_to_tokens([(0, 5), (5, 7), (7, 7)], spans).tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    ("text", "whole", "whole_or_fence", "fence", "in_prose"),
    [
        ('{"a":1}', 1, 1, 0, 1),
        (' \r\n{"a":1}\n', 1, 1, 0, 1),
        ('```json\n{"a":1}\n```', 0, 1, 1, 1),
        ('\n```\r\n{"a":1}\r\n```\r\n', 0, 1, 1, 1),
        ('~~~JSON\n{"a":1}\n~~~', 0, 1, 1, 1),
        ('Here:\n```json\n{"a":1}\n```\nDone.', 0, 0, 1, 1),
        ('```json\n{"a":1}\n```\nDone.', 0, 0, 1, 1),
        ('```json\n{"a":1}', 0, 0, 0, 1),
        ('```python\n{"a":1}\n```', 0, 0, 0, 1),
        ('```python\nx\n```\n```json\n{"a":1}\n```', 0, 0, 1, 1),
        ('```\nx\n```\n```json\n{"a":1}\n```', 0, 0, 1, 1),
        ('```\n{"a":1}\n```\n```\n{"a":1.0}\n```', 0, 0, 1, 1),
        ('```\n{"a":1}\n```\n```\n{"a":2}\n```', 0, 0, 0, 0),
        ('```json\n{"a":1}\n```\n```json\n{"a":1,}\n```', 0, 0, 0, 0),
        ('{"a":1} and {"b":2}', 0, 0, 0, 0),
        ('{"a":1} again {"a":1}', 0, 0, 0, 1),
        ('{"a":1} again { "a" : 1.0 }', 0, 0, 0, 1),
        ('{"a":1} or {"a":true}', 0, 0, 0, 0),
        ('{"a":1,} or rather {"a":1}', 0, 0, 0, 0),
        ('{"r":{"a":1},}', 0, 0, 0, 0),
        ('{"a":1}\n{"a":2}', 0, 0, 0, 0),
        ('If {x} and \\frac{1}{2} then {"a":1}.', 0, 0, 0, 1),
        ("If {x} and \\frac{1}{2}.", 0, 0, 0, 0),
        ("[1, 2]", 1, 1, 0, 0),
        ("no", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_extraction_takes_what_leaves_no_doubt(text, whole, whole_or_fence, fence, in_prose):
    found = [verdict(text, extract=policy).score for policy in POLICIES]
    assert found == [whole, whole_or_fence, fence, in_prose]


def test_two_different_objects_are_ambiguous():
    text = '{"score":0} ... {"score":1}'
    (span,) = verdict(text, extract="object").spans
    assert (text[span.start : span.stop], span.label) == ('{"score":1}', "another value than the first: ambiguous")


def test_the_value_must_equal_the_reference_where_asked():
    def match(text, reference, **options):
        return verdict(text, reference=reference, match_reference=True, **options).score

    assert match('{"b": [2.0], "a": 1}', '{"a": 1, "b": [2]}') == 1.0
    assert [match("1", reference) for reference in ("true", '"1"', "[1]", "1.0")] == [0, 0, 0, 1]
    assert match("not JSON", "1") == 0.0
    assert [match("1", reference) for reference in (None, "", "not JSON", '{"a":1,"a":1}')] == [None] * 4
    assert faults('{"a": 1, "c": 3}', None, '{"a": 2, "b": 2}', match_reference=True) == ["1", '"c": 3', "}"]
    assert verdict('{"age": "x", "name": 1}', PERSON, '{"age": "x", "name": 1}', match_reference=True).score == 0.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ('{"age": 1, "name": 1}', 1.0),
        ('{"age": 1}', 1 / 2),
        ('{"age": "x", "name": 1}', 1 / 2),
        ('{"age": "x"}', 0.0),
        ("{}", 0.0),
        ("[]", 0.0),
        ('{"age": 1, "name": 1, "x": 1}', 2 / 3),
        ('{"age": 1, "name": 1, "tags": [1]}', 2 / 3),
        ('{"age": 1, "tags": [1]}', 1 / 3),
        ('{"age": 1,}', 0.0),
    ],
)
def test_the_share_of_required_properties_that_are_right(text, share):
    assert verdict(text, {"type": "object", **PERSON}, partial=True).score == pytest.approx(share)


def test_a_property_that_differs_from_the_reference_is_not_right():
    options = {"match_reference": True, "partial": True}
    assert verdict('{"age": 1, "name": "x"}', PERSON, '{"age": 1, "name": "y"}', **options).score == 0.5


def test_a_format_is_checked_only_where_asked():
    schema = {"format": "date"}
    assert verdict('"2020-02-30"', schema).score == 1.0
    assert verdict('"2020-02-30"', schema, formats=True).score == 0.0
    assert verdict('"2020-02-29"', schema, formats=True).score == 1.0


def test_the_draft_decides_how_a_schema_is_read():
    schema = {"items": [{"type": "null"}], "additionalItems": False}
    assert faults("[null, 2, 3]", schema, draft="draft7") == ["2, 3"]
    assert faults("[null, 2, 3]", {"$schema": "http://json-schema.org/draft-07/schema#", **schema}) == ["2, 3"]


def test_a_schema_comes_from_a_file(tmp_path):
    path = tmp_path / "person.json"
    path.write_text("\ufeff" + json.dumps(PERSON), encoding="utf-8")
    assert faults('{"age": "x", "name": 1}', str(path)) == ['"x"']
    path.write_text('{"type":\n "object",}')
    with pytest.raises(InputError, match=r"person.json', line 2: a comma with nothing behind it; mend the file$"):
        JsonSchema(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": {"type": "objekt"}}, r"schema: at \$.type: 'objekt' is not valid"),
        ({"schema": {"pattern": "("}}, r"schema: at \$.pattern: "),
        ({"schema": {"$ref": "#/$defs/no"}}, r"schema: \$ref '#/\$defs/no' leads nowhere"),
        ({"schema": {"$schema": "urn:mine"}}, r"schema: its \$schema 'urn:mine' is unknown"),
        ({"schema": {"$schema": "http://json-schema.org/draft-03/schema#"}}, r"schema: its \$schema '.*draft-03"),
        ({"schema": {"enum": [float("nan")]}}, "schema: it cannot be written as JSON"),
        ({"schema": ["type"]}, "schema: a JSON Schema is an object, not list"),
        ({"schema": "nowhere.json"}, "schema: 'nowhere.json' cannot be read"),
        ({"schema": {"format": "phone"}, "formats": True}, "formats: the library cannot check 'phone'"),
        ({"schema": {}, "partial": True}, "partial: the schema requires no properties"),
        ({"partial": True}, "partial: the schema requires no properties"),
        ({"extract": "any"}, "extract: 'any' is no policy"),
        ({"draft": "7"}, "draft: '7' is unknown"),
    ],
)
def test_what_cannot_work_is_refused_at_once_in_one_line(options, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        JsonSchema(**options)
    assert "\n" not in str(error.value)


def test_a_remote_reference_is_refused_and_never_fetched(monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_network)
    for ref in ("https://example.com/a.json", "http://127.0.0.1:9/a.json", "file:///etc/passwd", "other.json"):
        with pytest.raises(InputError, match="leads nowhere; put it under"):
            JsonSchema({"properties": {"a": {"items": {"$ref": ref}}}})
    assert verdict("{}", {"$ref": "https://json-schema.org/draft/2020-12/schema"}).score == 1.0


def test_the_deepest_value_meets_a_recursive_schema():
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [{"items": {"$ref": "#/$defs/tree"}}, {}]}}}
    assert [verdict("[" * n + "]" * n, schema).score for n in (64, 65, 100_000)] == [1, 0, 0]


def test_many_faults_are_shown_up_to_a_hundred():
    text = json.dumps([1] * 5000)
    assert len(verdict(text, {"items": {"type": "string"}}).spans) == 100


def test_it_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(JsonSchema(PERSON, partial=True)))
    assert sent([Sample("", '{"age": 1}')])[0].score == 0.5


@law
@given(any_text | soup.map("".join))
def test_any_text_is_judged_and_what_is_valid_is_json(text):
    panel = {policy: JsonSchema({"type": ["object", "array"]}, extract=policy) for policy in POLICIES}
    result = judge(panel, [Sample("", text)])
    assert set(result.errors.values()) == {0}
    for policy in POLICIES:
        found = extract_json(text, policy)
        right = result.verdicts[0][policy].score == 1
        assert right is (isinstance(found, Node) and isinstance(found.value, dict | list))
        if right:
            assert json.loads(text[found.start : found.stop]) == found.value


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{}' * 10_000,
        "{" * 100_000,
        '{"' * 50_000,
        '{"' + "{" * 100_000 + '"x',
        "```\n" * 20_000,
        "```json\n1,\n```\n" * 5_000,
        '{"a":1}' * 10_000 + "{",
        "`" * 100_000,
        "\ud800" * 100_000,
    ],
    ids=lambda text: ascii(text[:6]),
)
def test_hostile_text_takes_linear_time(text):
    panel = {policy: JsonSchema({"type": "string"}, extract=policy) for policy in POLICIES}
    verdicts = judge(panel, [Sample("", text)]).verdicts[0]
    assert [verdicts[policy].score for policy in POLICIES] == [0, 0, 0, 0]
