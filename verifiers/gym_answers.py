"""Which text of a completion is the answer to a problem of reasoning-gym, and whether it is one answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .answer_extraction import Answer, Policy, extract_answer
from .number import parse_quantity, quantities

__all__ = ["EXPRESSIONS", "admitted", "answer_texts"]

_TAG = re.compile(r"<(/?)answer>", re.I)
_WORD = re.compile(r"[^\W\d_]+")
_NUMBER = re.compile(r"[0-9]+(?:[.,:][0-9]+)*")
_OTHER = re.compile(r"[0-9\n,;/]|\b(?:or|and)\b", re.I)  # what makes two answers of one
_COMMAND = re.compile(r"\\[A-Za-z]+")
MAX_LENGTH = 20_000  # characters of an answer that is looked at

# Their scorers hand the answer to Python's eval; only what is equal to a right answer reaches them.
EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Their scorers hand the answer to sympy, which evaluates it; only a formula reaches them. True: with functions in it.
EXPRESSIONS: Mapping[str, bool] = {
    "countdown": False,
    "puzzle24": False,
    "polynomial_multiplication": False,
    "simple_integration": True,
    "intermediate_integration": True,
}
# No Integral among them: the problem is no answer to itself.
_FUNCTION = re.compile(r"a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|Abs|erf|pi|E|C")
_DECIMAL = r"[0-9]{1,15}(?:\.[0-9]{1,15})?(?![0-9A-Za-z_(.])"
_SMALL = r"-?[0-9]{1,3}(?![0-9.])|\(\s?-?[0-9]{1,3}\s?(?:/\s?[0-9]{1,3}\s?)?\)"
_POWER = rf"\*\*\s?(?:{_SMALL})(?!\s*\*\*)"  # no tower of powers
_FORMULA = re.compile(rf"(?:\s|[A-Za-z]+(?![0-9_])|{_DECIMAL}|{_POWER}|\*(?!\s?\*)|[-+/(),])*+")
# Answers of a fixed form; their scorers skip over what they cannot read.
FORMS = {
    "propositional_logic": re.compile(r"[A-Z()\s∧∨→↔¬]+"),
    "quantum_lock": re.compile(r"[A-C](?:[\s,]*(?:→|->)?[\s,]*[A-C])*"),
    "rubiks_cube": re.compile(r"(?:[URFDLBMESXYZurfdlbmesxyz][wi]?['’]?2?\s*)+"),
    "rush_hour": re.compile(r"[A-Z][+-][0-9]+(?:[\s,]+[A-Z][+-][0-9]+)*"),
    "sokoban": re.compile(r"[LURD]+"),
}
# Problems with several right answers that need not look like the one that is given; their scorers read all of it.
OPEN = frozenset({"boxnet", "graph_color", "knight_swap", "palindrome_generation"})
_PLAYED = frozenset({"jugs", "shortest_path", "tower_of_hanoi", "word_ladder"})  # see game_moves


def answer_texts(completion: str, extract: Policy = "auto") -> list[Answer]:
    """The one answer of a completion: as it stands between its last ``<answer>`` tags, then without what wraps it.

    >>> [found.text for found in answer_texts('So: <answer>{"A": 1}</answer>')]
    ['{"A": 1}', '"A": 1']
    """
    tagged = _last_tag(completion) if extract in ("auto", "answer_tag") else None
    found = extract_answer(completion, extract)
    if tagged is None or (found is not None and not tagged.start <= found.start <= tagged.stop):
        return [] if found is None else [found]
    return [tagged] if found is None or found == tagged else [tagged, found]


def _last_tag(text: str) -> Answer | None:
    """What stands between the last pair of tags, blanks at its ends aside; None where nothing does."""
    best, opened = None, None
    for match in _TAG.finditer(text):
        if not match[1]:
            opened = match.end()
        elif opened is not None:
            inside = text[opened : match.start()]
            start = opened + len(inside) - len(inside.lstrip())
            best = Answer(inside.strip(), start, start + len(inside.strip()))
            opened = None
    return best if best is not None and best.text else None


def admitted(name: str, answer: str, entry: Mapping[str, Any]) -> str | None:
    """The text for the scorer of the data set ``name``; None where the answer is more or other than one answer.

    Many scorers take the first number of "12 or 13", skip what they cannot read, or look at the beginning alone. So an
    answer must be of the game's form, or a formula, or else hold no word that the right answer does not hold and no
    more numbers than that.

    >>> entry = {"answer": "12", "metadata": {}}
    >>> [admitted("gsm_symbolic", text, entry) for text in ("12 apples", "12 or 13", "twelve")]
    ['12', None, None]
    """
    reference, answer = entry.get("answer"), answer.strip()
    if not answer or len(answer) > MAX_LENGTH:
        return None
    if name in EVALUATED:
        right = (reference, *(entry.get("metadata", {}).get("valid_answers") or ()))
        return answer if answer in [str(text).strip() for text in right] else None
    if name in EXPRESSIONS:
        return answer if _is_formula(answer, EXPRESSIONS[name], entry.get("metadata", {})) else None
    if name in FORMS:
        return answer if FORMS[name].fullmatch(answer) else None
    if name in OPEN or name in _PLAYED or not isinstance(reference, str):
        return answer
    if parse_quantity(reference.strip()) is not None:
        return _one_number(answer)
    return answer if _no_more(answer, reference) else None


def _one_number(answer: str) -> str | None:
    """The only number of the answer; None where there are more, digits within words ("1a") among them."""
    found = quantities(answer)
    if len(found) != 1 or "none" in found[0][1:]:
        return None
    start, stop = found[0][0].start, found[0][0].stop
    rest = f"{answer[:start]} {answer[stop:]}"
    return None if _OTHER.search(rest) else answer[start:stop]


def _no_more(answer: str, reference: str) -> bool:
    given, wanted = _parts(answer), _parts(reference)
    if not any(wanted):  # signs alone
        return answer == reference.strip()
    return any(given) and given[0] <= wanted[0] and given[1] <= wanted[1]


def _parts(text: str) -> tuple[int, Counter[str]]:
    """How many numbers a text holds, and its words; commands of LaTeX are neither."""
    text = _COMMAND.sub(" ", text)
    return len(_NUMBER.findall(text)), Counter(word.casefold() for word in _WORD.findall(text))


def _is_formula(answer: str, functions: bool, facts: Mapping[str, Any]) -> bool:
    """Whether only numbers, signs, brackets, known names and the problem's variables stand there, powers small."""
    if len(answer) > 2000 or answer.count("(") > 100 or _FORMULA.fullmatch(answer) is None:
        return False
    variables = {str(name) for name in (facts.get("variable"), *(facts.get("variables") or ())) if name}
    names = {match.group() for match in re.finditer(r"[A-Za-z]+", answer)} - variables
    return not names or (functions and all(_FUNCTION.fullmatch(name) for name in names))
