"""Strict JSON with places: what is refused, where the fault is, and agreement with json.loads on the rest."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers.json_reading import MAX_DEPTH, Fault, Node, differences, read_json, read_value

law = settings(derandomize=True, deadline=None, max_examples=150)
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
pieces = st.sampled_from(list('{}[],:"\\1-0 \n\ufeff\x00\ud800é'))
pieces |= st.sampled_from(['"a"', "\\u0061", "\\ud83d", "\\ude00", ".5", "e9", "e999", "true", "null", "NaN"])
jsonish = st.lists(pieces, max_size=12).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def fault(text):
    found = read_json(text)
    assert isinstance(found, Fault)
    return text[found.start : found.stop], found.reason


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ('{"a": NaN}', "NaN", "'NaN' is no number in JSON"),
        ('{"a": Infinity}', "Infinity", "'Infinity' is no number in JSON"),
        ('{"a":{"b":-Infinity}}', "-Infinity", "'-Infinity' is no number in JSON"),
        ("[NaN]", "NaN", "'NaN' is no number in JSON"),
        ('{"a":1e400}', "1e400", "a number beyond the range of a double"),
        ("-1E+400", "-1E+400", "a number beyond the range of a double"),
        ("1" * 5000, "1" * 5000, "a number beyond the range of a double"),
        ("1" * 310, "1" * 310, "a number beyond the range of a double"),
        ('{"score":0,"score":1}', '"score"', "duplicate key 'score'"),
        ('{"a":0,"\\u0061":1}', '"\\u0061"', "duplicate key 'a'"),
        ('{"a":{"b":1,"b":1}}', '"b"', "duplicate key 'b'"),
        ('{"a":"\\ud800"}', "\\ud800", "half a surrogate pair in a string"),
        ('"\\ude00\\ud83d"', "\\ude00", "half a surrogate pair in a string"),
        ('"\\ud800\\ud83d\\ude00"', "\\ud800", "half a surrogate pair in a string"),
        ('"\ud800"', "\ud800", "half a surrogate pair in a string"),
        ('"a\nb"', "\n", "the control character '\\n' in a string"),
        ('"\x00"', "\x00", "the control character '\\x00' in a string"),
        ('"\\x41"', "\\x", "'\\\\x' is no escape"),
        ('"\\u00g1"', "\\u", "'\\\\u' is no escape"),
        ('{"a":1,}', ",", "a comma with nothing behind it"),
        ("[1, ]", ",", "a comma with nothing behind it"),
        ("[,1]", ",", "',' stands where a value should"),
        ("{a:1}", "a", "'a' stands where a key should"),
        ("{1:1}", "1", "'1' stands where a key should"),
        ("{'a':1}", "'a'", "\"'a'\" is not in double quotes"),
        ("{“a”:1}", "“a”", "'“a”' is not in double quotes"),
        ('{"a" 1}', "1", "'1' stands where a colon should"),
        ('{"a":}', "}", "'}' stands where a value should"),
        ('{"a":1]', "]", "']' stands where a comma or } should"),
        ("[1 2]", "2", "'2' stands where a comma or ] should"),
        ("[1}", "}", "'}' stands where a comma or ] should"),
        ("{1 // one\n}", "1", "'1' stands where a key should"),
        ("// one\n1", "//", "'//' is a comment; JSON has none"),
        ("[/* one */1]", "/*", "'/*' is a comment; JSON has none"),
        ("True", "True", "'True' stands where a value should"),
        ("\ufeff{}", "\ufeff", "'\\ufeff' is a byte order mark"),
        ("\xa0{}", "\xa0", "'\\xa0' stands where a value should"),
        ("{}\u2028", "\u2028", "text behind the value"),
        ("\x0b{}", "\x0b", "'\\x0b' stands where a value should"),
        ("{}\n{} \n", "{}", "text behind the value"),
        ("{}}", "}", "text behind the value"),
        ("```json\n{}\n```", "```json", "'```json' is a code fence, not JSON"),
        ("Here is it: {}", "Here", "'Here' stands where a value should"),
        ("", "", "the text ends where a value should stand"),
        (" \n", "", "the text ends where a value should stand"),
        ('{"a"', "", "the text ends where a colon should stand"),
        ('{"a":1', "", "the text ends where a comma or } should stand"),
        ('["a', "", "the text ends inside a string"),
    ],
)
def test_the_first_fault_is_named_and_located(text, place, reason):
    assert fault(text) == (place, reason)


@pytest.mark.parametrize(
    "text",
    ["01", "-01", "-", "+1", "1.", ".5", "-.5", "1e", "1e+", "0x10", "1_000", "1.5.2", "1e5.2", "--1", "00", "1-"],
)
def test_numbers_are_written_as_the_standard_says(text):
    assert fault(text) == (text, f"'{text}' is not written as JSON writes numbers")


@pytest.mark.parametrize("text", ["١", "１", "½", "tru", "nul", "undefined", "TRUE"])
def test_other_words_and_digits_are_no_values(text):
    assert fault(text)[0] == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-0", 0),
        ("-0.0", -0.0),
        ("1E+2", 100.0),
        ("1e-400", 0.0),
        ("1.7976931348623157e308", 1.7976931348623157e308),
        ("9" * 308, int("9" * 308)),
        ('"\\ud83d\\ude00\\u0000\\/\\b"', "😀\x00/\b"),
        ('"\x7f\u2028é\ufeff"', "\x7f\u2028é\ufeff"),
        ("\t\r\n 5 \n", 5),
        ('{"":{"":[]}}', {"": {"": []}}),
        ("null", None),
    ],
)
def test_legal_but_rare_json_is_read(text, value):
    found = read_json(text)
    assert isinstance(found, Node)
    assert (repr(found.value), repr(json.loads(text))) == (repr(value), repr(value))


def test_depth_is_limited_without_recursion():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert read_json(deep).stop == 2 * MAX_DEPTH
    assert read_json(f"[{deep}]") == Fault(MAX_DEPTH, MAX_DEPTH + 1, f"nested deeper than {MAX_DEPTH}")
    assert read_json("[" * 100_000 + "]" * 100_000).start == MAX_DEPTH
    assert read_json('{"a":' * 100_000).reason == f"nested deeper than {MAX_DEPTH}"
    assert read_json("[" * 50_000 + "]" * 50_000, max_depth=50_000).stop == 100_000


def test_places_are_counted_in_the_whole_text():
    text = 'x {"a": [1, {"b": "c"}]} y'
    found = read_json(text, 2, 24)
    assert {path: text[node.start : node.stop] for path, node in found.walk()} == {
        (): '{"a": [1, {"b": "c"}]}',
        ("a",): '[1, {"b": "c"}]',
        ("a", 0): "1",
        ("a", 1): '{"b": "c"}',
        ("a", 1, "b"): '"c"',
    }
    assert found.at(["a", 1, "b"]).key == (13, 16)
    assert [text[slice(*found.at(path).member)] for path in (["a", 1, "b"], ["a", 0])] == ['"b": "c"', "1"]
    assert read_json(text, 2, 23) == Fault(23, 23, "the text ends where a comma or } should stand")
    assert read_value(text, 2).stop == 24


@law
@given(values, st.sampled_from([None, 1]), st.booleans())
def test_what_python_writes_is_read_as_python_reads_it_and_every_place_holds_its_value(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    found = read_json(text)
    assert isinstance(found, Node)
    assert repr(found.value) == repr(json.loads(text))
    for path, node in found.walk():
        assert repr(json.loads(text[node.start : node.stop])) == repr(node.value)
        assert found.at(path) is node
        if node.key:
            assert json.loads(text[slice(*node.key)]) == path[-1]


@law
@given(any_text | jsonish)
def test_what_is_read_python_reads_too_and_can_write_out(text):
    found = read_json(text)
    if isinstance(found, Node):
        assert repr(json.loads(text)) == repr(found.value)
        json.dumps(found.value, allow_nan=False, ensure_ascii=False).encode()
    else:
        assert 0 <= found.start <= found.stop <= len(text)
        assert found.reason.isprintable()


@law
@given(jsonish)
def test_what_python_reads_is_refused_only_for_a_named_reason(text):
    try:
        json.loads(text)
    except ValueError:
        assert isinstance(read_json(text), Fault)
        return
    found = read_json(text)
    named = ("no number", "beyond the range", "duplicate key", "surrogate")
    assert isinstance(found, Node) or any(name in found.reason for name in named)


@law
@given(values, values)
def test_values_differ_where_python_says_so(one, other):
    def marked(value):
        if isinstance(value, bool):
            return ("bool", value)
        if isinstance(value, list):
            return [marked(item) for item in value]
        return {key: marked(item) for key, item in value.items()} if isinstance(value, dict) else value

    a, b = read_json(json.dumps(one)), read_json(json.dumps(other))
    assert (not list(differences(a, b))) is (marked(one) == marked(other))
    assert not list(differences(a, a))


@pytest.mark.parametrize(
    ("found", "wanted", "places"),
    [
        ("1", "1.0", []),
        ("1", "true", [("1", None)]),
        ("0", "false", [("0", None)]),
        ("null", "0", [("null", None)]),
        ('{"a": [1, 2]}', '{"a": [1, 3]}', [("2", "a")]),
        ('{"a": [1, 2, 3, 4]}', '{"a": [1, 2]}', [("3, 4", "a")]),
        ('{"a": [1]}', '{"a": [1, 2]}', [("]", "a")]),
        ('{"a": 1, "c": 3}', '{"a": 1, "b": 2}', [('"c": 3', "c"), ("}", "b")]),
        ('{"b": 1, "a": 2}', '{"a": 2.0, "b": 1}', []),
        ("[1]", '{"0": 1}', [("[1]", None)]),
    ],
)
def test_the_differing_part_is_located(found, wanted, places):
    there = differences(read_json(found), read_json(wanted))
    assert [(found[fault.start : fault.stop], top) for fault, top in there] == places


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 20_000,
        '"' + "\\u0041" * 20_000,
        '"' + "\\" * 100_001 + '"',
        "[" + "1," * 50_000,
        " " * 100_000,
        "-" * 100_000,
        "1" * 100_000,
        "1e" + "9" * 100_000,
        "'" * 100_000,
        "[[]," * 25_000,
        "\x00" * 100_000,
    ],
    ids=lambda text: ascii(text[:6]),
)
def test_hostile_text_takes_linear_time(text):
    assert isinstance(read_json(text), Fault)


def test_a_long_fraction_is_a_number():
    assert math.isclose(read_json("0." + "3" * 100_000).value, 1 / 3)
