import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import InputError, Sample, Verdict
from apportion.verifiers.math_answer import MathAnswer
from apportion.verifiers.math_notation import canonical
from apportion.verifiers.math_numbers import read_quantity
from apportion.verifiers.panel import judge
from apportion.verifiers.workers import WorkerFailure

pytest.importorskip("math_verify")

TOWER = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"
POLYNOMIAL = "+".join(f"x^{{{power}}}" for power in range(25))

# reference, answers that say the same, answers that do not
TABLE = [
    # plain numbers
    (
        "1234",
        ["1,234", "1{,}234", "1\\,234", "1 234", "1234.0", "$1,\\!234$", "１２３４", "+1234"],
        ["12,34", "(1,234)"],
    ),
    ("1.234", ["1.2340"], ["1,234"]),
    ("(1,234)", [], ["1234"]),
    ("1000000", ["10^6", "1e6", "1 million", "1,000,000"], ["1000000.4", "1,000,00"]),
    ("1", ["0.999...", "0.\\overline{9}", "\\frac{7}{7}"], ["0.9999999", "0.999999999999999", "1.0000001"]),
    ("0", ["-0", "0.0", "+0", "\\frac{0}{5}"], ["1e-30", "-1"]),
    ("-5", ["−5", "–5", "- 5", "-5.0", "$-5$"], ["5", "+5", "--5"]),
    (
        "5",
        ["5.", "05", "\\text{5}", "\\mathrm{5}", "**5**"],
        ["−5", "5!", "5^2", "5x", "5i", "5\\pi", "5 or 6", "5, 6", "5 + 1"],
    ),
    (
        "3\\times10^{8}",
        ["3e8", "3E+8", "300000000", "3 × 10^8", "3 x 10^8", "3\\cdot 10^8", "0.3e9"],
        ["3", "3e7", "3e"],
    ),
    ("3", ["3rd", "3^{\\text{rd}}", "(3)", "{3}"], ["3e8", "\\{3, 4\\}", "1/3"]),
    ("2^{10}", ["1024", "4^5", "2^10", "2¹⁰"], ["210", "20", "2^{11}"]),
    ("1.5 \\times 10^{-3}", ["0.0015", "1.5e-3", "\\frac{3}{2000}"], ["1.5e3", "0.015"]),
    # fractions
    (
        "\\frac{1}{2}",
        ["1/2", "0.5", ".5", "\\dfrac{1}{2}", "\\tfrac12", "\\frac12", "½", "2/4", "50\\%"],
        ["2", "12", "-\\frac12"],
    ),
    (
        "1\\frac{1}{2}",
        ["\\frac{3}{2}", "1.5", "1 1/2", "1½", "3/2"],
        ["\\frac{1}{2}", "\\frac{11}{2}", "1\\cdot\\frac12"],
    ),
    ("-\\frac{1}{2}", ["\\frac{1}{-2}", "\\frac{-1}{2}", "-0.5", "-1/2"], ["\\frac{-1}{-2}", "0.5"]),
    ("-1\\frac{1}{4}", ["-1.25", "-\\frac54"], ["-0.75"]),
    (
        "\\frac{1}{3}",
        ["0.333...", "0.\\overline{3}", "0.3333333333333333", "\\frac{\\frac13}{1}"],
        ["0.33", "0.3333", "0.333333"],
    ),
    ("\\frac{1}{12}", ["0.0833333333333333"], ["0.0833"]),
    ("0.0833333333333333", ["\\frac{1}{12}"], ["\\frac{1}{11}"]),
    ("33.3", ["\\frac{333}{10}"], ["\\frac{100}{3}"]),
    ("\\frac{1}{2^{99}}", ["2^{-99}", "\\left(\\frac12\\right)^{99}"], ["\\frac{1}{2^{98}}", "0"]),
    ("\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}", [], ["\\frac{1}{3 \\cdot 2^{2006}}", "\\frac16", "0"]),
    # percent
    ("28\\%", ["28 percent", "28%", "0.28", "\\frac{7}{25}", "28 \\%"], ["28", "0.28\\%", "2800\\%"]),
    ("0.28", ["28\\%"], ["28"]),
    ("28", [], ["28\\%"]),
    # units
    (
        "12",
        ["12 cm", "12\\text{ cm}", "12\\,\\mathrm{cm}^2", "\\$12", "12 dollars", "12 apples", "€12"],
        ["12 or 13", "12 dozen", "12%"],
    ),
    ("12 cm", ["12", "120 mm", "0.12 m", "12 centimeters"], ["12 m", "12 cm^2", "12 kg", "13 cm"]),
    ("5 \\text{ cm}^2", ["5 square centimeters", "5 cm²", "500 mm^2"], ["5 cm"]),
    ("90", ["90^\\circ", "90°", "90 degrees"], ["\\frac{\\pi}{2}"]),
    ("90^\\circ", ["90", "\\frac{\\pi}{2}", "90 \\text{ degrees}"], ["100^\\circ", "90^\\circ C"]),
    ("4\\sqrt{2}\\text{ cm}", ["4\\sqrt{2}", "\\sqrt{32} cm"], ["4\\sqrt{2} m", "4"]),
    ("4\\pi", ["4\\pi \\text{ square units}", "12.5663706143592"], ["4", "4\\pi x"]),
    ("\\frac{\\sqrt{3}}{2}", ["\\sin 60^\\circ", "\\cos(30°)"], ["\\sin 60"]),
    ("\\frac{2}{3}x", ["2/3x", "2x/3", "2/3 x"], ["\\frac{2}{3x}"]),
    ("60 \\text{ km/h}", ["60 kilometers per hour", "60"], ["60 km"]),
    ("1011_2", ["1011_{2}", "1011"], ["1011_3"]),
    ("\\$18.90", ["18.90", "$18.9", "18.9 dollars", "1890 cents"], ["€18.90", "18"]),
    ("2 hours", ["120 minutes", "2 h", "120 min", "7200 \\text{ sec}"], ["2 minutes", "2 min"]),
    ("30", ["30 min", "30\\text{ sec}", "\\max(20, 30)", "min(30, 40)"], ["\\min(20, 30)"]),
    ("\\sec^2(y)", ["sec^2(y)", "(sec y)^2", "1/cos^2(y)"], ["sec(y)"]),
    # roots, constants, functions
    ("4", ["\\sqrt{16}", "2^2", "\\log_2 16"], ["4\\sqrt(2)", "4\\sqrt{2}", "4\\sqrt2", "\\sqrt4"]),
    (
        "4\\sqrt{2}",
        ["\\sqrt{32}", "4\\sqrt2", "4√2", "4\\sqrt(2)", "4*sqrt(2)", "\\frac{8}{\\sqrt{2}}", "2^{5/2}"],
        ["4", "5.657"],
    ),
    ("\\pi", ["π", "pi", "3.14159265358979", "\\frac{2\\pi}{2}"], ["3.14", "3.14159", "p", "\\frac{22}{7}"]),
    ("6", ["2(3)", "(2)(3)", "3!", "\\binom{4}{2}", "\\frac{1}{2}(12)"], ["5", "2\\frac{3}{1}"]),
    ("\\frac{1}{\\sqrt{n}}", ["\\sqrt{1/n}", "n^{-1/2}", "\\frac{\\sqrt n}{n}"], ["\\sqrt{n}", "\\frac{1}{n}"]),
    ("x", ["\\frac{x^2}{x}", "2x - x"], ["\\sqrt{x^2}", "|x|", "y", "-x"]),
    ("\\tan^2(y)+1", ["\\sec^2(y)", "1 + \\tan^2 y"], ["\\sec(y)", "\\sec^2(x)"]),
    ("x^2-1", ["(x+1)(x-1)", "-1+x^2", "x²−1", "x**2 - 1"], ["x^2+1", "x^2", "(x-1)^2"]),
    (POLYNOMIAL, [POLYNOMIAL, "\\frac{x^{25}-1}{x-1}"], [POLYNOMIAL + "+1"]),
    ("\\frac{x}{2}+C", ["C + 0.5x"], ["\\frac{x}{2}"]),
    ("(-1)^n", ["\\cos(n\\pi)"], ["1"]),
    ("2\\frac{1}{2}x", ["\\frac{5x}{2}", "2.5x"], ["x"]),
    ("e^{2x}", ["(e^x)^2", "\\exp(2x)"], ["2e^x"]),
    ("\\frac{1}{x+1}", ["(x+1)^{-1}"], ["\\frac{1}{x}+1"]),
    ("n(n+1)/2", ["\\frac{n^2+n}{2}", "\\sum_{k=1}^{n} k"], ["\\frac{n^2}{2}"]),
    ("3+4i", ["4i+3", "3 + 4 i"], ["3-4i", "7", "3+4j"]),
    ("-1", ["e^{i\\pi}", "i^2"], ["i", "1"]),
    ("\\infty", ["∞", "+\\infty", "\\text{infinity}"], ["-\\infty", "0"]),
    # equations and inequalities
    ("5", ["x = 5", "x=5", "n = 10/2 = 5", "2+3 = 5", "\\text{Area} = 5"], ["x = 6", "4 = 5", "x > 5", "5 = x + 1"]),
    ("x = 5", ["5", "x=5.0", "5 = x"], ["y = 5", "x = 6", "x"]),
    ("2x+4y-3=0", ["y = -\\frac{1}{2}x + \\frac{3}{4}", "4x+8y=6"], ["2x+4y-4=0", "2x+4y-3", "x+2y=3"]),
    ("34x+45y-20z+100=0", ["-34x-45y+20z-100=0"], ["34x+45y+20z+100=0"]),
    ("y = 2x + 1", ["2x + 1", "y-2x-1=0", "y = 1 + 2x"], ["y = 2x", "x = 2y+1"]),
    ("x > 3", ["3 < x", "(3, \\infty)", "2x > 6", "x \\in (3,\\infty)"], ["x \\ge 3", "x < 3", "[3,\\infty)", "3"]),
    ("1 < x \\le 2", ["(1, 2]", "2 \\geq x > 1", "x\\in(1,2]"], ["(1,2)", "1 \\leq x < 2", "[1,2)"]),
    ("x=1, y=2", ["y = 2, x = 1", "x = 1 \\text{ and } y = 2"], ["x=2, y=1"]),
    # lists, sets, pairs, intervals
    ("1331 and 1728", ["1728, 1331", "1331, 1728", "\\{1331,1728\\}", "1,331 and 1,728"], ["1728", "1331 and 1729"]),
    ("1, 2", ["2, 1", "1 and 2", "x = 1 or x = 2", "\\{2, 1\\}", "1, 2, 2"], ["1", "1, 2, 3", "12", "1.2"]),
    ("[1,2]", [], ["(1,2)", "[1,2)", "\\{1,2\\}", "[2,1]"]),
    ("(1,2]", ["(1, 2]", "]1,2]", "\\left(1, 2\\right]"], ["(1,2)", "[1,2]"]),
    (
        "\\{1,2\\}",
        ["\\{2,1\\}", "{1, 2}", "1, 2", "\\left\\{1,2\\right\\}"],
        ["(1,2)", "[1,2]", "\\{1,2,3\\}", "\\{1\\}"],
    ),
    (
        "(1,2)",
        ["(1.0, 2)", "1, 2", "\\left( 1, \\frac42 \\right)", "x=1, y=2"],
        ["(2,1)", "\\{1,2\\}", "[1,2]", "(1,2,3)", "2, 1"],
    ),
    ("(1,\\frac{9}{2})", ["(1,4.5)", "(1, 4\\frac12)"], ["(1,4)", "(4.5,1)"]),
    ("100, 200, 300", ["100,200,300", "300, 200, 100"], ["100200300", "100, 200"]),
    ("\\pm 2", ["2, -2", "-2 \\text{ or } 2", "x = \\pm 2", "±2", "\\{-2, 2\\}"], ["2", "-2"]),
    ("1 \\pm \\sqrt{2}", ["1+\\sqrt2, 1-\\sqrt2"], ["1+\\sqrt{2}"]),
    (
        "(-\\infty,1)\\cup(2,\\infty)",
        ["(2,\\infty) ∪ (-\\infty,1)", "(-∞, 1) ∪ (2, ∞)"],
        ["(-\\infty,1]\\cup(2,\\infty)", "(1,2)"],
    ),
    ("\\mathbb{R}\\setminus\\{1\\}", ["(-\\infty,1)\\cup(1,\\infty)"], ["\\mathbb{R}", "(1,\\infty)"]),
    ("\\emptyset", ["∅", "\\varnothing", "\\{\\}"], ["0", "\\{0\\}"]),
    ("\\{x \\mid x > 2\\}", ["(2,\\infty)", "x > 2"], ["[2,\\infty)"]),
    ("k\\pi, k \\in \\mathbb{Z}", ["k\\pi", "\\pi k"], ["2k\\pi"]),
    ("840", ["840 and 840", "\\{840\\}"], ["840840", "840, 841"]),
    ("(0,1),(1,2)", ["(1,2), (0,1)", "\\{(0,1), (1,2)\\}"], ["(0,1)", "(1,0),(2,1)"]),
    # matrices
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        ["\\begin{bmatrix} 1 & 2 \\\\ 3 & \\frac{8}{2} \\end{bmatrix}"],
        ["\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "\\begin{pmatrix}1&2&3&4\\end{pmatrix}", "1,2,3,4"],
    ),
    # words, letters, times
    (
        "C",
        ["(C)", "\\text{(C)}", "\\textbf{C}", "C.", "(C) Paris", "C) 42", "c", "Option C"],
        ["B", "(B)", "A and C", "C, D", "Cat"],
    ),
    ("(C)", ["C", "\\text{C}"], ["D"]),
    ("Tuesday", ["\\text{Tuesday}", "tuesday", "**Tuesday**", "the Tuesday"], ["Wednesday", "T", "2"]),
    ("no solution", ["\\text{No solution}"], ["0", "solution"]),
    ("12:30", ["\\text{12:30}"], ["12.30", "1230", "12:31"]),
    ("3:00 PM", ["3:00 p.m.", "\\text{3:00 pm}"], ["3:00 am", "3"]),
    ("2024-01-05", ["2024-01-05"], ["2018", "2024"]),
    ("xy", ["yx", "x \\cdot y", "\\text{xy}"], ["x+y", "x"]),
    ("BAC", ["bac", "\\text{BAC}"], ["ABC", "CAB", "B, A, C"]),
    ("A", ["(A) 12", "A. Paris"], ["(A) or (B)", "A) or B)", "(A) (B) (C)", "A. B. C. D."]),
    ("3:00 PM", ["3 pm", "\\text{3 p.m.}"], ["3 am", "13:00 PM"]),
    # blanks and marks between digits, fractions in words
    (
        "12",
        ["12 ", "\\underline{12}"],
        ["1 2", "1\\ 2", "1-2", "12 tenths", "12 sixteenths", "12 thousands", "12 below 0"],
    ),
    ("345", ["345.0"], ["3-4-5", "3.4.5", "3 45", "34 5"]),
    ("3", [], ["3 fifths", "3 eighths", "3 hundredths", "3 millions"]),
    # what is asked for, named
    (
        "5",
        ["AB = 5", "m+n = 5", "f(3) = 5", "P(A) = 5", "\\angle A = 5", "|AB| = 5", "x^2 + y^2 = 5", "a_1 - b = 5"],
        ["3x = 5", "x^2 = 5", "\\sin x = 5", "AB = 6", "AB > 5", "a + b = 6 = 5"],
    ),
    ("x + y = 5", ["x = 5 - y"], ["5"]),
    ("(3,4)", ["(x,y) = (3,4)", "P = (3,4)"], ["(x,y) = (4,3)"]),
    ("(x,y) = (3,4)", ["(3,4)", "(x, y) = (3.0, 4)"], ["(4,3)", "(y,x) = (3,4)"]),
    ("x=5, y=6", ["5, 6", "(5,6)", "y=6, x=5"], ["6, 5", "(6,5)", "5"]),
    ("2, 2, 3", ["3, 2, 2", "2 \\text{ and } 3 \\text{ and } 2"], ["2, 3, 3", "2, 3", "2, 2, 2, 3"]),
    # units
    ("90 minutes", ["1 hour 30 minutes", "1 hour and 30 minutes", "1.5 hours", "1 hr 30 min"], ["1 hour 90 minutes"]),
    ("66 inches", ["5 \\text{ feet } 6 \\text{ inches}", "5 ft 6 in"], ["6 feet 5 inches", "5 feet 6 kg"]),
    ("\\$18", ["$18 dollars", "$18 each", "18 dollars"], ["$18 cm", "$18 tenths", "18 cents"]),
    ("(-\\infty, 2)", ["(-inf, 2)", "(-infinity, 2)"], ["(inf, 2)"]),
    ("\\mathbb{R}", ["\\mathbb R", "(-\\infty, \\infty)"], ["\\mathbb{Q}"]),
    ("red, blue", ["blue and red"], ["red"]),
    ("7 \\text{ p.m.}", ["7 pm", "7 PM"], ["7 am", "7"]),
    ("東京", ["\\text{東京}"], ["京都"]),
]
PAIRS = [(reference, answer, 1.0) for reference, right, _ in TABLE for answer in right]
PAIRS += [(reference, answer, 0.0) for reference, _, wrong in TABLE for answer in wrong]


def ask(reference, completion, **options):
    (verdict,) = MathAnswer(**options)([Sample("", completion, reference)])
    return verdict


@pytest.fixture(scope="module")
def table_scores():
    samples = [Sample("", rf"It is \boxed{{{answer}}}.", reference) for reference, answer, _ in PAIRS]
    return [getattr(verdict, "score", verdict) for verdict in MathAnswer()(samples)]


def test_the_table_is_long():
    assert len(PAIRS) > 400


@pytest.mark.parametrize("row", range(len(PAIRS)), ids=lambda row: f"{PAIRS[row][0][:24]}|{PAIRS[row][1][:24]}")
def test_an_answer_is_right_exactly_when_it_says_the_same(table_scores, row):
    assert table_scores[row] == PAIRS[row][2]


@pytest.mark.parametrize(
    ("reference", "answer", "switch"),
    [
        ("28\\%", "28", {"percent": "lenient"}),
        ("28", "28\\%", {"percent": "lenient"}),
        ("33.3", "\\frac{100}{3}", {"decimals": "reference_precision"}),
        ("0.3333", "\\frac13", {"decimals": "reference_precision"}),
        ("3.14", "\\pi", {"decimals": "reference_precision"}),
        ("x", "\\sqrt{x^2}", {"assume_positive": True}),
        ("2\\ln x", "\\ln(x^2)", {"assume_positive": True}),
    ],
)
def test_a_switch_allows_what_it_names(reference, answer, switch):
    assert ask(reference, rf"\boxed{{{answer}}}", **switch).score == 1.0


@pytest.mark.parametrize(
    ("reference", "answer", "switch"),
    [
        ("28\\%", "0.28\\%", {"percent": "lenient"}),
        ("28\\%", "29", {"percent": "lenient"}),
        ("33", "\\frac{100}{3}", {"decimals": "reference_precision"}),
        ("33.3", "33.4", {"decimals": "reference_precision"}),
        ("3.14", "\\frac{16}{5}", {"decimals": "reference_precision"}),
        ("12 cm", "12", {"units": "require"}),
        ("12", "12 cm", {"units": "require"}),
        ("4\\sqrt2 cm", "4\\sqrt2", {"units": "require"}),
        ("|x|", "-x", {"assume_positive": True}),
    ],
)
def test_a_switch_allows_no_more_than_it_names(reference, answer, switch):
    assert ask(reference, rf"\boxed{{{answer}}}", **switch).score == 0.0


@pytest.mark.parametrize(
    "reference", [None, "", "  ", "$$", "???", "\\frac{1}{", "2 +", "f'(x) = ?", "\\boxed{}", "1/0/"]
)
def test_without_a_readable_reference_there_is_no_verdict(reference):
    for completion in (r"\boxed{1}", "no idea", rf"\boxed{{{reference}}}"):
        assert ask(reference, completion) == Verdict(None)


@pytest.mark.parametrize("reference", ["4", "x^2", "Tuesday"])
@pytest.mark.parametrize("completion", ["", "no idea", r"\boxed{}", r"\boxed{"])
def test_no_answer_scores_zero_without_a_span(reference, completion):
    assert ask(reference, completion) == Verdict(0.0)


@pytest.mark.parametrize(
    ("completion", "reference", "text", "score", "label"),
    [
        (r"We get \boxed{\frac{1}{3}}.", "\\frac13", r"\frac{1}{3}", 1.0, "right answer"),
        (r"First \boxed{2}, no: $\boxed{3}$.", "2", "3", 0.0, "wrong answer"),
        ("So **73** of them.\n\nFinal Answer: **73**", "73", "73", 1.0, "right answer"),
        (r"\boxed{\text{13}}", "13", "13", 1.0, "right answer"),
        ("2 + 40 = 42\n#### 42\n" + "The check agrees. " * 30, "42", "42", 1.0, "right answer"),
        (r"\boxed{4\sqrt(}", "4", r"4\sqrt(", 0.0, "wrong answer"),
        ("💩 \\boxed{−5}", "-5", "−5", 1.0, "right answer"),
    ],
)
def test_the_span_is_the_answer_and_nothing_else(completion, reference, text, score, label):
    verdict = ask(reference, completion)
    (span,) = verdict.spans
    assert (verdict.score, completion[span.start : span.stop], span.score, span.label) == (score, text, score, label)


@pytest.mark.parametrize("reference", ["1", "x", "\\sqrt{2}"])
@pytest.mark.parametrize("answer", [TOWER, "10^{10^{10}}", "\\sqrt{9^{9^{9}}}", "(10^7)!", "2^{x^{3^{99}}}"])
def test_a_tower_of_powers_gets_no_verdict(reference, answer):
    assert ask(reference, rf"\boxed{{{answer}}}") == Verdict(None)


@pytest.mark.parametrize(
    "answer", ["(" * 2000, "{" * 5000, "x^" * 3000, "\\sqrt{" * 900 + "}" * 900, "1+" * 4000 + "1", "9" * 20_000]
)
def test_a_monstrous_answer_is_wrong(answer):
    assert ask("7", "Answer: " + answer).score == 0.0


def test_a_comparison_that_takes_too_long_is_a_counted_fault_and_others_keep_their_verdicts():
    slow = r"\int_0^1 \sin(x^{x^x}) e^{\tan x^3} dx"
    verifier = MathAnswer(timeout_s=1.5, workers=1)
    samples = [Sample("", rf"\boxed{{{answer}}}", r"\sqrt{2}") for answer in (slow, r"2^{1/2}", "3")]
    first, second, third = verifier(samples)
    assert isinstance(first, WorkerFailure)
    assert first.kind == "timeout"
    assert (second.score, third.score) == (1.0, 0.0)
    result = judge({"answer": verifier}, samples)
    assert (result.errors["answer"], result.verdicts[0]["answer"]) == (1, Verdict(None))


def test_a_verdict_depends_neither_on_the_batch_nor_on_the_order(table_scores):
    samples = [Sample("", rf"\boxed{{{answer}}}", reference) for reference, answer, _ in PAIRS[::5]]
    backwards = [verdict.score for verdict in MathAnswer()(samples[::-1])]
    assert backwards[::-1] == table_scores[::5]
    assert [MathAnswer()([sample])[0].score for sample in samples[::4]] == table_scores[::20]


def test_threads_may_share_one_verifier():
    samples = [Sample("", rf"\boxed{{(x+{n})^2}}", f"x^2+{2 * n}x+{n * n}") for n in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        scores = list(threads.map(lambda sample: MathAnswer()([sample])[0].score, samples * 2))
    assert scores == [1.0] * 16


def test_an_equal_verifier_made_from_a_pickle_gives_the_same():
    verifier = pickle.loads(pickle.dumps(MathAnswer()))
    assert verifier == MathAnswer()
    assert verifier([Sample("", r"\boxed{\sqrt{8}}", r"2\sqrt{2}")])[0].score == 1.0


def test_model_text_is_never_run(tmp_path):
    path = tmp_path / "made"
    for answer in (
        f"__import__('pathlib').Path('{path}').touch()",
        f"open('{path}', 'w')",
        f"{{{{open('{path}','w')}}}}",
    ):
        assert ask("x+1", f"Answer: {answer}").score == 0.0
        assert ask(answer, r"\boxed{1}").score in (0.0, None)
    assert not path.exists()


@pytest.mark.parametrize(
    "options", [{"extract": "tail"}, {"percent": "maybe"}, {"units": "ignore"}, {"workers": 0}, {"timeout_s": 0}]
)
def test_a_bad_option_names_itself(options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}: "):
        MathAnswer(**options)


def test_a_thousand_completions_take_seconds():
    answers = [str(n) for n in range(500)] + [rf"\frac{{{n}}}{{7}}x^{{{n % 5}}}+\sqrt{{{n}}}" for n in range(125)] * 4
    samples = [
        Sample("", rf"So we get \boxed{{{answer}}}.", answer.replace("x", "y") if n % 3 else answer)
        for n, answer in enumerate(answers)
    ]
    started = time.process_time()
    verdicts = MathAnswer()(samples)
    assert time.process_time() - started < 2.0  # the parent's own share
    assert [verdict.score for verdict in verdicts[:3]] == [1.0, 1.0, 1.0]
    assert all(verdict.score == 1.0 for verdict in verdicts[::3])


LETTERS = st.sampled_from(
    [
        *"0123456789+-*/^_{}()[]$%,.=<>x ",
        "\\frac",
        "\\sqrt",
        "\\boxed{",
        "Answer: ",
        "½",
        "−",
        "\ud800",
        "個",
        "\\",
        "\n",
    ]
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(LETTERS, max_size=30).map("".join), st.lists(LETTERS, max_size=8).map("".join))
def test_any_text_is_judged_without_a_fault_with_spans_inside(completion, reference):
    result = judge({"it": MathAnswer()}, [Sample("", completion, reference)])
    assert (result.errors, result.first_error) == ({"it": 0}, {})


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(max_size=40))
def test_canonical_spelling_is_stable(text):
    assert canonical(canonical(text)) == canonical(canonical(canonical(text)))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.fractions(min_value=-(10**9), max_value=10**9))
def test_every_fraction_reads_as_itself(value):
    assert read_quantity(rf"\frac{{{value.numerator}}}{{{value.denominator}}}").value == value


def test_a_run_of_money_signs_takes_no_time():
    from apportion.verifiers.math_notation import canonical

    assert canonical("$1aaaa" * 1000 + "$x$1").count("1") == 1001
