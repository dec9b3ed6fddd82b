"""Judges the tool calls of a transcript: their form, whether they were answered, and whether they failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

from .errors import InputError
from .json_reading import Fault, read_json
from .verdict import Sample, Span, Verdict

__all__ = ["ToolResult", "tool_output_spans"]

_MAX_LABEL = 60
_ENVELOPE = ("content", "result", "output")  # where a response holds what the tool said


def tool_output_spans(
    text: str, response_open: str = "<tool_response>", response_close: str = "</tool_response>"
) -> list[tuple[int, int]]:
    """Half-open character ranges of tool output, tags included; for transcripts of which only the text is left.

    From the opening tag to the first closing one, or to the end of the text. An engine that knows which ids it put in
    should say so itself: the text alone cannot tell a tool's words from a policy that writes the tags.

    Args:
        text: a completion.
        response_open, response_close: what stands around a tool's output.

    >>> text = "Look: <tool_response>42</tool_response> so 42."
    >>> [text[start:stop] for start, stop in tool_output_spans(text)]
    ['<tool_response>42</tool_response>']
    """
    spans, start = [], text.find(response_open)
    while start >= 0:
        closed = text.find(response_close, start + len(response_open))
        stop = len(text) if closed < 0 else closed + len(response_close)
        spans.append((start, stop))
        start = text.find(response_open, stop)
    return spans


class _Event(NamedTuple):
    """A tool call, a tool's output, or a piece out of place; ``fault`` says what is wrong with it, empty if nothing."""

    kind: str  # "call", "output", "stray"
    start: int
    stop: int
    fault: str = ""


@dataclass(frozen=True)
class ToolResult:
    """The share of tool calls that went well, each call located; abstains where there is none.

    A call goes wrong if it is no strict JSON object with ``name`` and an object ``arguments``, names an unknown tool,
    has arguments that break the tool's schema, is never closed, has no response although calls of its turn have one,
    or fails. Responses without a call, and closing tags that close nothing, count as calls that went wrong.

    Tool output is what stands between the response tags, whatever else is in it. Where the metadata have
    ``tool_spans`` (``[start, stop)`` ranges of characters that the engine put in, maybe none), these are the tool
    output, and response tags elsewhere were written by the policy: wrong, and no answer to any call. Spans lie on
    the policy's own characters only, but for responses without a call where the text is all there is.

    Args:
        call_open, call_close: what stands around a call. Special tokens are not in the text, so take no such tag.
        response_open, response_close: what stands around a tool's output.
        tools: names, or declarations with ``name`` and ``parameters`` (a JSON schema; also within ``function``);
            None allows any tool.
        error_text: a regular expression; the call failed if its response begins with it. None looks only for JSON
            that reports an error: ``error`` that is not empty or null, ``status: error``, ``isError: true``.
        required: a completion without calls scores 0.

    >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_response>Error: no b</tool_response>'
    >>> verdict, = ToolResult()([Sample("", text)])
    >>> verdict.score, [(span.start, span.stop, span.label) for span in verdict.spans]
    (0.0, [(0, 61, 'failed call of add: Error: no b')])
    """

    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    response_open: str = "<tool_response>"
    response_close: str = "</tool_response>"
    tools: Sequence[str | Mapping[str, Any]] | None = None
    error_text: str | None = r"Error\b|Traceback\b|\{'error':"
    required: bool = False

    def __post_init__(self) -> None:
        tags = {name: getattr(self, name) for name in ("call_open", "call_close", "response_open", "response_close")}
        for name, tag in tags.items():
            if not isinstance(tag, str) or not tag or any(tag in other for key, other in tags.items() if key != name):
                raise InputError(f"{name}: {tag!r} is empty or part of another tag; give four tags that differ")
        _ = self._validators, self._error

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        text = sample.completion
        events = sorted(self._events(text, _given_spans(sample)), key=lambda event: event.start)
        spans = [span for turn in _turns(events) for span in self._judge_turn(text, turn)]
        if not spans:
            return Verdict(0.0 if self.required else None)
        return Verdict(sum(span.score for span in spans) / len(spans), tuple(sorted(spans, key=lambda s: s.start)))

    def _events(self, text: str, given: list[tuple[int, int]] | None) -> Iterator[_Event]:
        """Everything that counts, in no order: tool output, and what the policy wrote around it."""
        outputs = self._outputs(text) if given is None else given
        for start, stop in outputs:
            parts = [(0, stop - start)] if given is None else self._outputs(text[start:stop])
            for first, last in parts or [(0, stop - start)]:
                yield _Event("output", start + first, start + last)
        borders = [0, *(place for span in outputs for place in span), len(text)]
        for start, stop in zip(borders[::2], borders[1::2]):
            own = text[start:stop]
            forged = [] if given is None else self._outputs(own)
            for first, last in forged:
                yield _Event("stray", start + first, start + last, "tool output written by the policy")
            edges = [0, *(place for span in forged for place in span), len(own)]
            for first, last in zip(edges[::2], edges[1::2]):
                yield from self._calls(text, start + first, start + last)

    def _outputs(self, text: str) -> list[tuple[int, int]]:
        return tool_output_spans(text, self.response_open, self.response_close)

    def _calls(self, text: str, start: int, stop: int) -> Iterator[_Event]:
        """Calls in ``text[start:stop]``, which holds no tool output.

        The first closing tag ends a call, as for the engines that run them. Where more than one opening tag stands
        before it, the first one opens the call if what follows is a call; else each but the last was never closed.
        """
        opened: list[re.Match[str]] = []
        for tag in self._tags.finditer(text, start, stop):
            if tag.lastgroup == "opens":
                opened.append(tag)
            elif not opened:
                yield _Event("stray", tag.start(), tag.end(), "a closing tag that closes nothing")
            elif tag.lastgroup == "closes":
                fault = self._malformed(text[opened[0].end() : tag.start()])
                if fault and len(opened) > 1:
                    yield from _unclosed(text, opened[:-1], opened[-1].start())
                    del opened[:-1]
                    fault = self._malformed(text[opened[0].end() : tag.start()])
                yield _Event("call", opened[0].start(), tag.end(), fault)
                opened.clear()
        yield from _unclosed(text, opened, stop)

    @cached_property
    def _tags(self) -> re.Pattern[str]:
        opens, closes, response = map(re.escape, (self.call_open, self.call_close, self.response_close))
        return re.compile(f"(?P<opens>{opens})|(?P<closes>{closes})|(?P<response>{response})")

    def _malformed(self, body: str) -> str:
        """What is wrong with the text of a call; empty if nothing."""
        try:
            call = _strict_json(body)
        except ValueError as error:
            return f"malformed call: {_short(str(error))}"
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"].strip():
            return "malformed call: no name"
        if not isinstance(call.get("arguments"), dict):
            return "malformed call: no object of arguments"
        if self._validators is None:
            return ""
        name = call["name"]
        if name not in self._validators:
            return f"call of an unknown tool: {_short(name)}"
        return _schema_fault(self._validators[name], name, call["arguments"])

    @cached_property
    def _validators(self) -> dict[str, Any] | None:
        """By the tool's name, what checks its arguments; None in place of a check where only the name is known."""
        if self.tools is None:
            return None
        if isinstance(self.tools, str | Mapping) or not isinstance(self.tools, Sequence):
            raise InputError(f"tools: {_short(repr(self.tools))} is no list; give names or declarations of tools")
        return dict(map(_declared, self.tools))

    @cached_property
    def _error(self) -> re.Pattern[str] | None:
        try:
            return None if self.error_text is None else re.compile(rf"\s*+(?:{self.error_text})")
        except re.error as error:
            raise InputError(f"error_text: {self.error_text!r} is no regular expression ({error})") from error

    def _judge_turn(self, text: str, turn: Sequence[_Event]) -> Iterator[Span]:
        """Spans of calls and the outputs behind them; too few outputs go to the last calls that can have run."""
        yield from (Span(event.start, event.stop, 0.0, event.fault) for event in turn if event.kind == "stray")
        calls = [event for event in turn if event.kind == "call"]
        outputs = [event for event in turn if event.kind == "output"]
        takers = calls if len(outputs) >= len(calls) else [call for call in calls if not call.fault]
        answers = dict(zip(takers[max(0, len(takers) - len(outputs)) :], outputs))
        for call in calls:
            fault = call.fault
            if not fault and call in answers:
                fault = self._failure(text, call, answers[call])
            elif not fault and outputs:
                fault = "call without a response"
            yield Span(call.start, call.stop, 0.0 if fault else 1.0, fault or "call")
        yield from (Span(extra.start, extra.stop, 0.0, "response without a call") for extra in outputs[len(calls) :])

    def _failure(self, text: str, call: _Event, output: _Event) -> str:
        """What the tool says of a failure; empty if nothing."""
        said = text[output.start : output.stop].removeprefix(self.response_open).removesuffix(self.response_close)
        if not any(_reports_error(layer, self._error) for layer in (said, *_layers(said))):
            return ""
        body = text[call.start + len(self.call_open) : call.stop - len(self.call_close)]
        return f"failed call of {_short(_strict_json(body)['name'])}: {_short(said)}"


def _given_spans(sample: Sample) -> list[tuple[int, int]] | None:
    """The tool output that the engine reports, checked and in order; None where it reports none."""
    given = sample.metadata.get("tool_spans")
    if given is None:
        return None
    spans = sorted((index(start), index(stop)) for start, stop in given)
    edges = [0, *(place for span in spans for place in span), len(sample.completion)]
    if edges != sorted(edges):
        raise ValueError(f"tool_spans {_short(str(spans))} overlap or leave the {edges[-1]} characters of the text")
    return [(start, stop) for start, stop in spans if start < stop]


def _turns(events: Sequence[_Event]) -> Iterator[Sequence[_Event]]:
    """Cut before every call that follows a tool's output."""
    start, answered = 0, False
    for place, event in enumerate(events):
        if event.kind == "call" and answered:
            yield events[start:place]
            start, answered = place, False
        answered = answered or event.kind == "output"
    yield events[start:]


def _unclosed(text: str, opened: Sequence[re.Match[str]], stop: int) -> Iterator[_Event]:
    """Calls that no closing tag ends: each runs to the next one, the last to ``stop``."""
    for tag, end in zip(opened, [*(tag.start() for tag in opened[1:]), stop]):
        length = len(text[tag.start() : end].rstrip())
        yield _Event("call", tag.start(), tag.start() + length, "malformed call: never closed")


def _strict_json(text: str) -> Any:
    """The value of a JSON text; raises ValueError on anything looser."""
    read = read_json(text)
    if isinstance(read, Fault):
        raise ValueError(read.reason)
    return read.value


def _layers(said: str) -> list[object]:
    """What a tool said as JSON, and what stands in its envelope; empty where it is no JSON."""
    try:
        value: object = json.loads(said)
    except (ValueError, RecursionError):
        return []
    return [value, *(value[key] for key in _ENVELOPE if key in value)] if isinstance(value, dict) else [value]


def _reports_error(layer: object, beginning: re.Pattern[str] | None) -> bool:
    if isinstance(layer, dict):
        return bool(layer.get("error")) or layer.get("isError") is True or layer.get("status") == "error"
    return isinstance(layer, str) and beginning is not None and beginning.match(layer) is not None


def _declared(tool: object) -> tuple[str, Any]:
    """Name of a tool, and the checker of its arguments, or None."""
    declared = tool.get("function", tool) if isinstance(tool, Mapping) else {"name": tool}
    name, schema = (declared.get(key) if isinstance(declared, Mapping) else None for key in ("name", "parameters"))
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"tools: {_short(str(tool))} has no name; give a name, or a mapping with name and parameters")
    if schema is None:
        return name, None
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise InputError("tools: schemas need jsonschema; pip install 'apportion[json]'") from error
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise InputError(f"tools: the parameters of {name!r} are no JSON schema ({error.message})") from error
    return name, Draft202012Validator(schema, registry=REGISTRY)  # a registry of its own: nothing is downloaded


def _schema_fault(validator: Any, name: str, arguments: Mapping[str, Any]) -> str:
    try:
        error = None if validator is None else next(validator.iter_errors(arguments), None)
    except RecursionError:
        return f"arguments of {_short(name)} nest too deep"
    return (
        "" if error is None else f"arguments of {_short(name)}: {error.json_path[:_MAX_LABEL]} breaks {error.validator}"
    )


def _short(text: str) -> str:
    line = " ".join(text[: 2 * _MAX_LABEL].split())
    return line if len(line) <= _MAX_LABEL else line[: _MAX_LABEL - 1] + "…"
