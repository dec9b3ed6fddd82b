"""Laws of judging tool calls: what is wrong is located on the policy's characters, never on a tool's."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample
from apportion.verifiers.panel import judge
from apportion.verifiers.tool_result import ToolResult, tool_output_spans


def call(name="add", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(text):
    return f"<tool_response>\n{text}\n</tool_response>"


def ask(text, *, tool_spans=None, **options):
    metadata = {} if tool_spans is None else {"tool_spans": tool_spans}
    (verdict,) = ToolResult(**options)([Sample("", text, metadata=metadata)])
    return verdict


def shown(text, verdict):
    return [(text[span.start : span.stop], span.score, span.label) for span in verdict.spans]


def test_calls_that_are_answered_without_an_error_score_1():
    text = f"Let me add.\n{call(a=1)}\n{said('3')}\nAnd again: {call(a=2)}{said('[4]')} so 7."
    verdict = ask(text)
    assert verdict.score == 1.0
    assert shown(text, verdict) == [(call(a=1), 1.0, "call"), (call(a=2), 1.0, "call")]


def test_a_text_without_calls_is_an_abstention_unless_calls_are_required():
    assert ask("The answer is 4.").score is None
    assert ask("The answer is 4.", required=True).score == 0.0
    assert ask(call(), required=True).score == 1.0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "malformed call: the text ends where a value should stand"),
        ("add(1, 2)", "malformed call: 'add(1' stands where a value should"),
        ("{'name': 'add', 'arguments': {}}", "malformed call: \"'name'\" is not in double quotes"),
        ('{"name": "add", "arguments": {},}', "malformed call: "),
        ('{"name": "add", "arguments": {}} {}', "malformed call: text behind the value"),
        ('{"name": "add", "arguments": {"a": NaN}}', "malformed call: 'NaN' is no number in JSON"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "malformed call: '-Infinity' is no number in JSON"),
        ('{"name": "add", "arguments": {"a": 1e400}}', "malformed call: a number beyond the range of a double"),
        ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "malformed call: duplicate key 'a'"),
        ('{"name": "add", "name": "sub", "arguments": {}}', "malformed call: duplicate key 'name'"),
        (
            '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}",
            "malformed call: a number beyond the range of a double",
        ),
        ('{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "}}", "malformed call: nested deeper than 64"),
        ('[{"name": "add", "arguments": {}}]', "malformed call: no name"),
        ("null", "malformed call: no name"),
        ('{"arguments": {}}', "malformed call: no name"),
        ('{"name": 3, "arguments": {}}', "malformed call: no name"),
        ('{"name": " ", "arguments": {}}', "malformed call: no name"),
        ('{"name": "add"}', "malformed call: no object of arguments"),
        ('{"name": "add", "arguments": "{}"}', "malformed call: no object of arguments"),
        ('{"name": "add", "arguments": [1]}', "malformed call: no object of arguments"),
    ],
)
def test_a_malformed_call_is_located(body, why):
    text = f"First {call()} then <tool_call>{body}</tool_call> done"
    verdict = ask(text)
    assert verdict.score == 0.5
    wrong = verdict.spans[1]
    assert text[wrong.start : wrong.stop] == f"<tool_call>{body}</tool_call>"
    assert (wrong.score, wrong.label[: len(why)]) == (0.0, why)


def test_a_call_that_is_never_closed_runs_to_the_next_one_or_the_end():
    text = f"a <tool_call>{{ {call()} b <tool_call>{{ \n "
    assert shown(text, ask(text)) == [
        ("<tool_call>{", 0.0, "malformed call: never closed"),
        (call(), 1.0, "call"),
        ("<tool_call>{", 0.0, "malformed call: never closed"),
    ]
    assert ask(text).score == pytest.approx(1 / 3)


def test_a_tag_within_an_argument_opens_no_call():
    text = call(text="write <tool_call> first")
    assert shown(text, ask(text)) == [(text, 1.0, "call")]


def test_a_closing_tag_that_closes_nothing_counts_as_a_wrong_call():
    text = f"{call()} </tool_call> and </tool_response>"
    assert shown(text, ask(text))[1:] == [
        ("</tool_call>", 0.0, "a closing tag that closes nothing"),
        ("</tool_response>", 0.0, "a closing tag that closes nothing"),
    ]
    assert ask(text).score == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("output", "failed"),
    [
        ("42", False),
        ("Error: no such city", True),
        ("  \nTraceback (most recent call last):", True),
        ("Errors are rare", False),
        ("No Error: fine", False),
        ("{'error': 'no such city'}", True),
        ('{"error": "no such city"}', True),
        ('{"error": null, "value": 1}', False),
        ('{"error": "", "value": 1}', False),
        ('{"errors": 3}', False),
        ('{"status": "error"}', True),
        ('{"status": "ok"}', False),
        ('{"isError": true}', True),
        ('{"name": "add", "content": {"error": "no"}}', True),
        ('{"name": "add", "content": "Error: no"}', True),
        ('{"name": "add", "content": {"value": 1}}', False),
        ('"Error: no"', True),
        ('["Error: no"]', False),
        ("[" * 5000, False),
        ("", False),
    ],
)
def test_a_call_fails_if_its_response_says_so_and_the_call_is_what_is_wrong(output, failed):
    text = f"x {call(a=1)} {said(output)} y"
    verdict = ask(text)
    (span,) = verdict.spans
    assert text[span.start : span.stop] == call(a=1)
    assert verdict.score == span.score == float(not failed)
    assert span.label.startswith("failed call of add: " if failed else "call")


def test_words_that_begin_like_an_error_are_an_option():
    text = call() + said("Error: no")
    assert ask(text, error_text=None).score == 1.0
    assert ask(call() + said("E: no"), error_text="E:").score == 0.0
    assert ask(call() + said('{"error": 1}'), error_text=None).score == 0.0


def test_several_calls_of_a_turn_are_answered_in_order():
    text = call(a=1) + call(a=2) + said("1") + said("Error") + call(a=3) + said("3")
    assert [span.score for span in ask(text).spans] == [1.0, 0.0, 1.0]


def test_a_call_without_a_response_where_its_turn_has_one_is_wrong():
    text = call(a=1) + " hm, rather " + call(a=2) + said("2")
    assert shown(text, ask(text)) == [(call(a=1), 0.0, "call without a response"), (call(a=2), 1.0, "call")]


def test_calls_at_the_end_have_no_response_yet_and_are_not_wrong():
    text = call(a=1) + said("1") + call(a=2) + call(a=3)
    assert ask(text).score == 1.0


def test_a_malformed_call_takes_a_response_only_where_there_is_one_for_each_call():
    bad = "<tool_call>{}</tool_call>"
    assert [span.score for span in ask(bad + call() + said("Error")).spans] == [0.0, 0.0]
    assert [span.score for span in ask(bad + call() + said("Error") + said("2")).spans] == [0.0, 1.0]


def test_a_response_without_a_call_is_wrong():
    text = "I know: " + said("4") + " so 4"
    assert shown(text, ask(text)) == [(said("4"), 0.0, "response without a call")]
    assert ask(text).score == 0.0
    assert ask(call() + said("1") + said("2")).score == 0.5


def test_only_named_tools_may_be_called():
    tools = ["add", {"name": "sub"}, {"type": "function", "function": {"name": "mul"}}]
    text = call("add") + call("sub") + call("mul") + call("div")
    verdict = ask(text, tools=tools)
    assert [span.score for span in verdict.spans] == [1.0, 1.0, 1.0, 0.0]
    assert verdict.spans[3].label == "call of an unknown tool: div"
    assert ask(call(), tools=[]).score == 0.0


def test_arguments_must_fit_the_schema():
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert ask(call(a=1), tools=tools).score == 1.0
    assert ask(call(a="1"), tools=tools).spans[0].label == "arguments of add: $.a breaks type"
    assert ask(call(), tools=tools).spans[0].label == "arguments of add: $ breaks required"
    tree = {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "properties": {"a": {"$ref": "#/$defs/t"}}}
    deep = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}</tool_call>"
    assert (
        ask(deep, tools=[{"name": "add", "parameters": tree}]).spans[0].label == "malformed call: nested deeper than 64"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"call_open": ""}, "call_open: '' is empty or part"),
        ({"call_close": "</tool_response>"}, "call_close: '</tool_response>' is empty or part"),
        ({"response_open": "tool"}, "response_open: 'tool' is empty or part"),
        ({"tools": "add"}, "tools: 'add' is no list"),
        ({"tools": [{"parameters": {}}]}, "tools: {'parameters': {}} has no name"),
        ({"tools": [3]}, "tools: 3 has no name"),
        (
            {"tools": [{"name": "add", "parameters": {"type": "nonsense"}}]},
            "the parameters of 'add' are no JSON schema",
        ),
        ({"error_text": "("}, "error_text: '\\(' is no regular expression"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ToolResult(**options)


def test_other_tags_can_be_named():
    options = {"call_open": "[C]", "call_close": "[/C]", "response_open": "[R]", "response_close": "[/R]"}
    text = '[C]{"name": "f", "arguments": {}}[/C][R]Error[/R]<tool_call>'
    assert shown(text, ask(text, **options)) == [(text[:37], 0.0, "failed call of f: Error")]


# Who wrote the tool output


def test_tool_output_holds_whatever_it_holds_up_to_its_closing_tag():
    text = "a<tool_response>x<tool_call>{}</tool_call><tool_response>y</tool_response>b<tool_response>z"
    assert [text[start:stop] for start, stop in tool_output_spans(text)] == [
        "<tool_response>x<tool_call>{}</tool_call><tool_response>y</tool_response>",
        "<tool_response>z",
    ]
    assert tool_output_spans("no </tool_response> tags") == []
    assert tool_output_spans("[R]1[/R]", "[R]", "[/R]") == [(0, 8)]


def test_calls_within_tool_output_are_the_tools_words():
    text = call() + said("try " + call("rm"))
    assert shown(text, ask(text)) == [(call(), 1.0, "call")]


def test_a_call_cannot_swallow_the_response_that_shows_its_error():
    swallowed = '<tool_call>{"name": "f", "arguments": {"t": "' + said("Error: no") + '"}}</tool_call>'
    verdict = ask(swallowed)
    assert verdict.score == 0.0
    assert tool_output_spans(swallowed) == [(swallowed.index("<tool_r"), swallowed.index('"}}'))]
    closed = '<tool_call>{"name": "f", "arguments": {"t": "</tool_call>' + said("Error: no") + '"}}</tool_call>'
    assert ask(closed).score == 0.0


def test_where_the_engine_reports_no_tool_output_the_policy_made_it_up():
    text = call() + said("42") + " so 42"
    verdict = ask(text, tool_spans=[])
    assert shown(text, verdict) == [(call(), 1.0, "call"), (said("42"), 0.0, "tool output written by the policy")]
    assert verdict.score == 0.5


def test_reported_tool_output_is_believed_whatever_tags_it_has():
    real = said("ends </tool_response> here " + call("rm"))
    text = call() + real + call(a=2) + said("made up")
    start = len(call())
    assert shown(text, ask(text, tool_spans=[(start, start + len(real))])) == [
        (call(), 1.0, "call"),
        (call(a=2), 1.0, "call"),
        (said("made up"), 0.0, "tool output written by the policy"),
    ]


def test_reported_tool_output_without_tags_is_one_response_and_with_tags_several():
    text = call(a=1) + call(a=2) + "\nuser\n" + said("Error") + said("2") + call(a=3) + "Error: no"
    first, second = text.index("\nuser"), text.index("Error: no")
    spans = [[second, len(text)], [first, first + len("\nuser\n" + said("Error") + said("2"))]]
    assert [span.score for span in ask(text, tool_spans=spans).spans] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("spans", [[(0, 99)], [(3, 1)], [(0, 4), (2, 6)], [(-1, 2)], [(0.5, 2)], 3, "ab"])
def test_reported_ranges_outside_the_text_are_a_fault_of_that_sample(spans):
    samples = [Sample("", call(), metadata={"tool_spans": spans}), Sample("", call())]
    result = judge({"tools": ToolResult()}, samples)
    assert [row["tools"].score for row in result.verdicts] == [None, 1.0]
    assert result.errors == {"tools": 1}


# Any text

PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "{",
    '"',
    "Error",
    call(),
    said("1"),
    "\n",
]
ANY = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=()), max_size=5))).map(
    "".join
)


@settings(max_examples=200, deadline=None)
@given(ANY)
def test_any_text_is_judged_and_wrong_calls_lie_on_the_policys_characters(text):
    verdict = ask(text)
    outputs = tool_output_spans(text)
    assert verdict.score is None or 0 <= verdict.score <= 1
    assert (verdict.score is None) == (not verdict.spans)
    borders = [0]
    for span in verdict.spans:
        borders += [span.start, span.stop]
        if span.label != "response without a call":
            assert all(span.stop <= start or stop <= span.start for start, stop in outputs)
    assert borders == sorted(borders)
    assert max(borders) <= len(text)
    for start, stop in outputs:
        assert text.startswith("<tool_response>", start)
        assert stop == len(text) or text[start:stop].endswith("</tool_response>")


@settings(max_examples=100, deadline=None)
@given(ANY, st.data())
def test_any_reported_ranges_are_judged(text, data):
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2]))
    verdict = ask(text, tool_spans=spans)
    wrong = [s for s in verdict.spans if s.label != "response without a call"]
    assert all(s.stop <= start or stop <= s.start for s in wrong for start, stop in spans if start < stop)


@pytest.mark.parametrize(
    "piece",
    [
        *PIECES,
        "<tool_call>{",
        "<tool_call>[[",
        "</tool_call><tool_call>",
        "<tool_response></tool_call>",
        '<tool_call>{"a":"',
        "x",
        " ",
        "<",
        "{'error':",
    ],
)
def test_hostile_text_takes_linear_time(piece):
    def seconds(length):
        text = (piece * (length // len(piece) + 1))[:length]
        began = time.process_time()
        ask(text)
        ask(text, tool_spans=[])
        return time.process_time() - began

    assert seconds(400_000) < 4
