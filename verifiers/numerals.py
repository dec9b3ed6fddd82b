"""Numbers in model text: tokens with positions, and what may stand beside a number that is meant alone.

When in doubt a number is not read: a missed number costs a little evidence, a misread one puts blame on right work.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal, NamedTuple

__all__ = ["Edge", "Numeral", "Token", "edge_after", "edge_before", "tokenize", "unit_name", "unit_of"]


class Numeral(NamedTuple):
    """A number as written.

    Args:
        value: exact; a percentage is divided by 100. None where the digits cannot be trusted ("007", 50 digits).
        decimals: digits behind the point.
        percent: a percent sign follows.
        currency: the symbol, or "".
    """

    value: Fraction | None
    decimals: int
    percent: bool
    currency: str


class Token(NamedTuple):
    """A piece of text; ``kind`` is number, op, equals, open, close, word, wide, command, opaque or other."""

    kind: str
    start: int
    stop: int
    text: str
    numeral: Numeral | None = None


Edge = Literal["none", "prose", "hard"]

_DIGITS = (
    r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]{1,2}(?!\w))?"
    r"|\.[0-9]++"
    r"|\\[dt]?frac\{[0-9]{1,20}\}\{[0-9]{1,20}\}"
)
_TOKEN = re.compile(
    rf"""
    (?P<blank>[^\S\n]++)
    |(?P<opaque>                                      # versions, dates, times of day and ratios, hexadecimal
        [0-9]++(?:\.[0-9]++){{2,}}+
        |[0-9]{{4}}(?P<sep>[-/.])[0-9]{{1,2}}(?P=sep)[0-9]{{1,2}}(?![0-9])
        |[0-9]{{1,2}}(?P<sep2>[-/.])[0-9]{{1,2}}(?P=sep2)[0-9]{{4}}(?![0-9])
        |[0-9]++(?::[0-9]++)++
        |0[xXbBoO][0-9a-fA-F]++)
    |(?P<number>
        (?:(?P<symbol>\\?[$]|[€£¥₹])[ ]?)?
        (?P<digits>{_DIGITS})
        (?:(?P<suffix>\\?[$]|[ \u00a0]?[€£¥₹]))?
        (?P<percent>[ ]?(?:\\?%|percent\b))?)
    |(?P<arrow>[-=]{{1,2}}>|[→⇒⟹])
    |(?P<star>\*\*?)
    |(?P<op>\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|\\div(?![A-Za-z])|[-+−–×÷·⋅∙/∕⁄^²³])
    |(?P<equals>(?<![=<>!:~≠+*/-])=(?![=<>~]))
    |(?P<open>\()
    |(?P<close>\))
    |(?P<cross>[xX](?=[ ]*+[0-9(.$€£]))
    |(?P<word>[^\W\d_\u2e80-\U0010ffff][^\W\u2e80-\U0010ffff]*+(?:(?<=[0-9])\.[0-9]++)*+)
    |(?P<wide>[\u2e80-\U0010ffff])                    # scripts written without spaces, and emoji
    |(?P<command>\\[A-Za-z]++)
    |(?P<mark>[_`&]++)                                # emphasis, code, alignment: no meaning of their own
    |(?P<other>\\.|.)
    """,
    re.X | re.S,
)
_OPERATORS = dict.fromkeys("−–", "-") | dict.fromkeys(("×", "·", "⋅", "∙", r"\times", r"\cdot"), "*")
_OPERATORS |= dict.fromkeys("∕⁄", "/") | {r"\div": "÷"}

_BEFORE = re.compile(
    r"plus|minus|times|by|over|mod|modulo|negative|sqrt|root|log|ln|sin|cos|tan|gcd|lcm|max|min|power|choose", re.I
)
_AFTER = re.compile(
    r"plus|minus|times|divided|multiplied|over|mod|modulo|of|tens|(?:hundred|thousand|million|billion|trillion|dozen)s?"
    r"|squared|cubed|factorial|choose|pi|remainder|rem",
    re.I,
)
_PARTS = re.compile(r"half|halves|(?:third|quarter|fourth|fifth|tenth)s?|percent|fraction", re.I)
_UNIT_LETTERS = "aImgshlLdA"  # the article, and units of one letter; other letters are variables
_SILENT_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|q?quad|implies|[Rr]ightarrow|to|therefore|approx|boxed|leq?|geq?|lt|gt|neq?|begin|end|left|right)"
)
_OPENERS = frozenset("([{\"'“‘«<>|:;,.!?—…→$~\n\\") | {"\\(", "\\[", "\\\\", "\\$", "\\{", "\\,", "\\ "}
_CLOSERS = frozenset(")]}\"'”’»<>|:;,.!—…→$\n") | {"\\)", "\\]", "\\\\", "\\}", "\\,", "\\;", "\\ ", "\\!", "\\n"}
_MORE = re.compile(
    r"\W{0,3}(?:with\s)?\s?(?:an?\s)?(?:remainder\b|rem\b|[rR]\s?[0-9])|\s+and\s+(?:an?\b|one\b|[0-9]+/)"
)


def tokenize(text: str, start: int = 0, stop: int | None = None) -> list[Token]:
    """Tokens of ``text[start:stop]`` with positions in ``text``; blanks and marks of emphasis are left out.

    A star, or an x, is multiplication only between two operands and evenly spaced ("3*4", "3 x 4", not "**3** 4").
    """
    found = _TOKEN.finditer(text, start, len(text) if stop is None else stop)
    raw = [match for match in found if match.lastgroup != "blank"]
    tokens: list[Token] = []
    for place, match in enumerate(raw):
        kind, piece, numeral = match.lastgroup or "other", match.group(), None
        if kind == "mark":
            continue
        if kind in ("star", "cross"):
            if _joins(raw, place, kind):
                kind, piece = "op", "^" if piece == "**" else "*"
            elif kind == "star" and _emphasises(raw, place):
                continue
            else:
                kind = "op" if kind == "star" else "word"
        elif kind == "arrow":
            kind, piece = "other", "→"
        elif kind == "op":
            piece = _OPERATORS.get(piece, piece)
        elif kind == "number":
            numeral = _numeral(match)
        tokens.append(Token(kind, match.start(), match.end(), piece, numeral))
    return tokens


def edge_before(tokens: list[Token], place: int) -> Edge:
    """What stands before the token at ``place``: nothing that binds ("hard"), a word that does not, or "none" fits."""
    if place == 0:
        return "hard"
    before, glued = tokens[place - 1], tokens[place - 1].stop == tokens[place].start
    if before.kind in ("equals", "open"):
        called = before.kind == "open" and place > 1 and tokens[place - 2].stop == before.start
        return "none" if called and tokens[place - 2].kind in ("word", "command") else "hard"
    if before.kind == "wide":
        return "none" if before.text.isnumeric() else "prose"
    if before.kind == "close":
        return "none" if glued else "prose"
    if before.kind == "word":
        word = before.text
        of_part = word.lower() == "of" and place > 1 and _PARTS.fullmatch(tokens[place - 2].text)
        binds = glued or of_part or _BEFORE.fullmatch(word) or (len(word) == 1 and word not in _UNIT_LETTERS)
        return "none" if binds else "prose"
    if before.kind == "command":
        return "prose" if _SILENT_COMMAND.fullmatch(before.text) and not glued else "none"
    if before.kind == "other":
        if glued and before.text in ":;,." and place > 1 and _ends_glued_number(tokens[place - 2], before):
            return "none"
        if before.text in "√∛%#^'’" or before.text.isnumeric() or (glued and before.text not in _OPENERS):
            return "none"
        return "prose" if before.text == "," else "hard"
    return "none"


def edge_after(tokens: list[Token], place: int, text: str) -> Edge:
    """What stands at ``place``, behind a number or expression that ends just before it; see :func:`edge_before`."""
    end = tokens[place - 1].stop
    if place == len(tokens) or tokens[place].kind == "equals":
        return "hard"
    after, glued = tokens[place], tokens[place].start == end
    following = tokens[place + 1] if place + 1 < len(tokens) else None
    if _MORE.match(text, end) or text.startswith(("...", "…"), end):  # "17 / 5 = 3 remainder 2", "1 / 3 = 0.333..."
        return "none"
    if after.kind == "wide":
        return "none" if after.text.isnumeric() else "prose"
    if after.kind == "open":
        return "none" if glued else "hard"
    if after.kind == "close":
        return "hard"
    if after.kind == "word":
        single = len(after.text) == 1 and after.text not in _UNIT_LETTERS
        return "none" if glued or single or _AFTER.fullmatch(after.text) else "prose"
    if after.kind == "command":
        return "prose" if _SILENT_COMMAND.fullmatch(after.text) else "none"
    if after.text == "/" and following and following.kind == "word" and len(following.text) > 1:
        return "prose" if glued and following.start == after.stop else "none"  # "20/hour"
    if after.kind == "other":
        if glued and after.text in ":;,." and following and following.kind in ("number", "opaque"):
            return "none" if following.start == after.stop else "hard"
        doubtful = after.text in "?√∛°" or after.text.isnumeric() or (glued and after.text not in _CLOSERS)
        return "none" if doubtful else "hard"
    return "none"


def unit_of(tokens: list[Token], place: int) -> str | None:
    """The word at ``place`` as the unit of the number before it, if an operator, "=" or ")" follows; else None.

    >>> unit_of(tokenize("3 boxes + 2 boxes"), 1), unit_of(tokenize("3 boxes of 2"), 1)
    ('box', None)
    """
    if place + 1 >= len(tokens) or tokens[place].kind != "word":
        return None
    word, following = tokens[place].text, tokens[place + 1]
    glued = tokens[place - 1].stop == tokens[place].start
    rate = following.text == "/" and following.start == tokens[place].stop  # "miles/hour"
    if glued or rate or following.kind not in ("op", "equals", "close"):
        return None
    named = len(word) > 1 and word.isalpha() and not (_AFTER.fullmatch(word) or _PARTS.fullmatch(word))
    return unit_name(word) if named else None


def unit_name(word: str) -> str:
    """A unit without the ending of the plural, so that "1 box" and "2 boxes" agree."""
    return word.casefold().rstrip("s").rstrip("e")


def _ends_glued_number(token: Token, mark: Token) -> bool:
    return token.kind in ("number", "opaque") and token.stop == mark.start


def _emphasises(raw: list[re.Match[str]], place: int) -> bool:
    """Whether the star at ``place`` opens or closes emphasis; "cost * 5" and "n**2" are products without a value."""
    before = raw[place - 1] if place else None
    after = raw[place + 1] if place + 1 < len(raw) else None
    left = before is not None and before.end() == raw[place].start()
    right = after is not None and after.start() == raw[place].end()
    if before is None or after is None or not left or not right:
        return left != right or before is None
    marks = ("other", "mark", "arrow", "equals")
    opens = before.lastgroup in (*marks, "open") and before.group() not in ".…"
    return opens or after.lastgroup in (*marks, "close")


def _joins(raw: list[re.Match[str]], place: int, kind: str) -> bool:
    """Whether the star or x at ``place`` stands evenly spaced between two operands."""
    if not 0 < place < len(raw) - 1:
        return False
    before, here, after = raw[place - 1], raw[place], raw[place + 1]
    glued = here.start() == before.end()
    operands = before.lastgroup in ("number", "close") and (
        after.lastgroup in ("number", "open") or (after.lastgroup == "op" and after.group() in "-−–")
    )
    if kind == "cross" and glued and after.lastgroup == "open":  # 2x(3) is a variable more often than a product
        return False
    return operands and glued == (after.start() == here.end())


def _numeral(match: re.Match[str]) -> Numeral:
    digits = match["digits"]
    currency = ((match["symbol"] or "") + (match["suffix"] or "").strip()).replace("\\", "")
    percent = match["percent"] is not None
    value: Fraction | None = None
    decimals = 0
    if "frac" in digits:
        above, below = (int(part) for part in re.findall(r"[0-9]+", digits))
        value = Fraction(above, below) if below else None
    else:
        plain = re.sub(r"[^0-9.eE+-]", "", digits)
        whole, _, fraction = re.split("[eE]", plain)[0].partition(".")
        decimals = len(fraction)
        trusted = len(plain) <= 40 and not (len(whole) > 1 and whole[0] == "0")
        value = Fraction(plain) if trusted else None
    if percent and value is not None:
        value /= 100
    return Numeral(value, decimals, percent, currency[:1])
