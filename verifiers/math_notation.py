r"""One spelling for mathematics as models write it: LaTeX, plain text and Unicode signs become one LaTeX-like string.

Text is only rewritten, never evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

__all__ = ["MAX_LENGTH", "canonical"]

MAX_LENGTH = 10_000  # characters of an answer that are read

_SIGNS = {
    **dict.fromkeys("−–—‒﹣－", "-"), "×": r" \times ", "✕": r" \times ",
    **dict.fromkeys("⋅·∙", r" \cdot "),
    "÷": "/", "∕": "/", "⁄": "/", "π": r" \pi ", "∞": r" \infty ", "√": r" \sqrt ", "∛": r" \sqrt[3] ",
    "≤": r" \le ", "≥": r" \ge ",
    "≠": r" \ne ", "≈": r" \approx ", "±": r" \pm ", "∓": r" \mp ", "∪": r" \cup ",
    "∩": r" \cap ", "∈": r" \in ", "∅": r" \emptyset ", "ℝ": r" \mathbb{R} ",
    "°": r"^\circ ", "θ": r" \theta ", "α": r" \alpha ", "β": r" \beta ",
    "…": "...", "→": r" \to ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "⟨": "(", "⟩": ")",
    "€": "¤euro ", "£": "¤pound ", "¥": "¤yen ",
    "₹": "¤rupee ", "Ø": r" \emptyset ",
}  # fmt: skip
_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni"))
_SUBSCRIPT = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789"))

_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])[ ]?\.?")
_TEXT = re.compile(
    r"\\(?:text[a-z]{0,2}|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boxed|fbox|emph|underline)\*?[ ]?\{([^{}]*)\}"
)
_BLANKS = re.compile(
    r"(?<!\\)\\[,;: >]|~|\\q?quad(?![A-Za-z])|\\[hv]?space\*?\{[^{}]*\}|\\thinspace|\\phantom\{[^{}]*\}"
)
_THIN = re.compile(r"(?<=[0-9])(?:\\[,:; ]|~)(?=[0-9]{3}(?![0-9]))")
_FRAC = re.compile(
    r"\\frac\s*(?P<top>[0-9A-Za-z])\s*(?P<bottom>[0-9A-Za-z]|\{)|(\\frac\s*\{[^{}]*\})\s*(?P<low>[0-9A-Za-z])"
)
_NAMES = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|csc|log|ln|exp|sqrt|pi|infty|infinity"
    r"|inf|theta|alpha|beta|gcd|lcm|sec(?=\s?[\^({\\]|\s[a-z]\b)|(?:max|min)(?=\s?[({])"  # "5 sec", "5 min" are times
)
_INFINITY = re.compile(r"inf(?:inity)?\Z")
_PLAIN_NAME = re.compile(rf"(?<![A-Za-z\\])(?P<name>{_NAMES})(?![A-Za-z])")
_ROOT = re.compile(
    r"\\sqrt\s*(?P<degree>\[[^\[\]]*\])?\s*(?:(?P<paren>\()|(?P<atom>[0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\pi\b))"
)
_PERCENT = re.compile(r"\\?%|(?<=[0-9 }])\s*(?:percent|per cent)(?![A-Za-z])")


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    r"""The text in one spelling; digits, names and structure stay as they are.

    >>> canonical("−1½"), canonical(r"\dfrac12\,\text{cm}"), canonical("2 × 10⁸"), canonical("$1{,}234$")
    ('-1 \\frac{1}{2}', '\\frac{1}{2} cm', '2 \\times 10^{8}', '1,234')
    """
    text = text[:MAX_LENGTH]
    if not text.isascii():
        text = _ascii(text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text).replace("{,}", ",")
    text = _SIZE.sub("", text).replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = re.sub(r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|", text)
    text = re.sub(r"\\[lr]?dots[a-z]?(?![A-Za-z])|\\cdots", "...", text)
    text = _THIN.sub("", text.replace(r"\!", ""))
    text = _BLANKS.sub(" ", text)
    text = _dollars(text)
    for _ in range(4):  # wrappers in wrappers
        text, count = _TEXT.subn(_unwrapped, text)
        if not count:
            break
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "^\\\\circ ", text)
    text = _PERCENT.sub("%", text)
    text = re.sub(r"\\mathbb\s([A-Z])", r"\\mathbb{\1}", text)
    text = _stars(text)
    text = text.replace("<=", r" \le ").replace(">=", r" \ge ").replace("!=", r" \ne ")
    text = re.sub(r"\\(le|ge|ne)q?(?:slant)?(?![A-Za-z])", r"\\\1 ", text)
    text = _PLAIN_NAME.sub(lambda name: "\\" + _INFINITY.sub("infty", name["name"]) + " ", text)
    text = _FRAC.sub(_braced, text)
    text = _roots(text)
    return " ".join(text.split())


def _ascii(text: str) -> str:
    """Unicode signs as LaTeX, digits of any script as ASCII, the rest in compatibility form."""
    pieces: list[str] = []
    for char in text:
        if char.isascii():
            pieces.append(char)
        elif char in _SIGNS:
            pieces.append(_SIGNS[char])
        elif char in _SUPERSCRIPT:
            pieces.append(f"^{{{_SUPERSCRIPT[char]}}}")
        elif char in _SUBSCRIPT:
            pieces.append(f"_{{{_SUBSCRIPT[char]}}}")
        elif (digit := unicodedata.decimal(char, None)) is not None:
            pieces.append(str(digit))
        elif unicodedata.decomposition(char).startswith("<fraction>"):
            top, _, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
            pieces.append(rf" \frac{{{top}}}{{{bottom or 1}}}")
        else:
            pieces.append(unicodedata.normalize("NFKC", char))
    joined = "".join(pieces)
    joined = re.sub(r"(?<=[0-9+\-ni])\}\^\{(?=[0-9+\-ni])|(?<=[0-9])\}_\{(?=[0-9])", "", joined)  # 10⁻⁵
    return unicodedata.normalize("NFC", joined)[:MAX_LENGTH]


def _dollars(text: str) -> str:
    """Signs that open or close a formula go; those of money become a mark of their own."""
    text = text.replace(r"\$", "¤dollar ")
    for mark in (r"\(", r"\)", r"\[", r"\]"):
        text = text.replace(mark, " ")
    if text.count("$") == 1:
        return re.sub(r"\$(?=\s?-?[0-9.])", "¤dollar ", text).replace("$", "")
    if re.fullmatch(r"(?:[^$]*+\$[0-9.,](?!\$))++[^$]*+", text) and "$ " not in text:
        return text.replace("$", "¤dollar ")
    return text.replace("$", "")


def _unwrapped(match: re.Match[str]) -> str:
    inner = match.group(1)
    return inner if re.fullmatch(r"[^A-Za-z]*|[A-Za-z]", inner) else f" {inner} "


def _stars(text: str) -> str:
    r"""A star between operands is ``\cdot``, a double one a power; at a word's edge it is emphasis."""
    if "*" not in text:
        return text
    text = re.sub(r"(?<=[\w)}])\*\*(?=[\w({\\-])", "^", text)
    text = re.sub(r"(?<=[\w)}])(\s?)\*\1(?=[\w({\\-])", r" \\cdot ", text)
    return text.replace("*", "")


def _braced(match: re.Match[str]) -> str:
    if match["low"]:
        return f"{match.group(3)}{{{match['low']}}}"
    bottom = match["bottom"]
    return rf"\frac{{{match['top']}}}" + ("{" if bottom == "{" else f"{{{bottom}}}")


def _roots(text: str) -> str:
    r"""``\sqrt(...)`` and ``\sqrt 2`` get braces, so that nothing under a root can be cut off."""
    for _ in range(50):
        match = _ROOT.search(text)
        if match is None:
            break
        head = r"\sqrt" + (match["degree"] or "")
        if match["atom"]:
            text = f"{text[: match.start()]}{head}{{{match['atom']}}}{text[match.end() :]}"
            continue
        stop = _closing(text, match.end())
        if stop < 0:
            break
        text = f"{text[: match.start()]}{head}{{{text[match.end() : stop]}}}{text[stop + 1 :]}"
    return text


def _closing(text: str, start: int) -> int:
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return -1
