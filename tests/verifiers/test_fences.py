"""Fenced code: its content and nothing around it."""

import pytest

from apportion.verifiers.fences import fenced_blocks


def contents(text):
    return [(text[block.start : block.stop], block.language, block.closed) for block in fenced_blocks(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no fence, `code` only", []),
        ("```\na\n```", [("a\n", "", True)]),
        ("```python\na\n\n  b\n```\n~~~json\n{}\n~~~", [("a\n\n  b\n", "python", True), ("{}\n", "json", True)]),
        ("```Python title=x\r\na\r\n```\r\n", [("a\r\n", "python", True)]),
        ("```{.py}\na\n```", [("a\n", "py", True)]),
        ("````\n```\na\n```\n````", [("```\na\n```\n", "", True)]),
        ("```py\na", [("a", "py", False)]),
        ("```py", [("", "py", False)]),
        ("```\n```", [("", "", True)]),
        ("```a``` is inline\n```\nb\n```", [("b\n", "", True)]),
        ("~~~\n```\n~~~", [("```\n", "", True)]),
        ("    ```\nindented code is no fence", []),
    ],
)
def test_the_content_lies_between_the_fences(text, expected):
    assert contents(text) == expected


def test_a_long_run_of_fences_is_read_in_one_pass():
    assert len(fenced_blocks("```\n" * 20_000)) == 10_000
