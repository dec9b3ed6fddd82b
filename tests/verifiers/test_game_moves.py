"""Laws of played moves: they agree with reasoning-gym's own scorers, and the first bad move is where it is put."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.verifiers import Sample
from apportion.verifiers.game_moves import GAMES, GameMoves, play
from apportion.verifiers.gym_answers import _PLAYED, EXPRESSIONS
from apportion.verifiers.panel import judge

HANOI = {"num_disks": 2, "num_pegs": 3, "start_peg": 1, "target_peg": 3}
JUGS = {"puzzle": {"jug_capacities": [3, 5], "target": 4}}
LADDER = {"start_word": "COLD", "end_word": "WARM"}
PATH = {"matrix": [["*", "O", "X"], ["X", "O", "#"]], "solution": ["right", "down", "right"]}
WALLED = {"matrix": [["*", "X", "#"]], "solution": []}
NUMBERS = {"numbers": [94, 4, 61, 6], "target": 309}
FACTS = {
    "tower_of_hanoi": HANOI,
    "jugs": JUGS,
    "word_ladder": LADDER,
    "shortest_path": PATH,
    "countdown": NUMBERS,
    "puzzle24": {"numbers": [8, 5, 10, 6]},
}


def bad(game, answer, facts=None):
    """The text of the first bad move and why; None where all keep the rules."""
    played = play(game, answer, FACTS[game] if facts is None else facts)
    return None if played.bad is None else (played.pieces[played.bad].text, played.fault)


def solved(game, answer, facts=None):
    return play(game, answer, FACTS[game] if facts is None else facts).solved


def test_every_game_has_a_case_here_and_is_played_before_its_scorer_is_asked():
    assert FACTS.keys() == GAMES.keys()
    assert _PLAYED | (EXPRESSIONS.keys() & GAMES.keys()) == GAMES.keys()


@pytest.mark.parametrize(
    ("moves", "fault"),
    [
        (["1 1 2", "2 1 3", "1 2 3"], None),
        (["1 1 2", "2 1 2", "1 2 3"], (1, "a smaller disk lies there")),
        (["2 1 3"], (0, "the disk is not on top of that peg")),
        (["1 1 2", "1 3 1"], (1, "the disk is not on top of that peg")),
        (["1 1 4"], (0, "no such peg")),
    ],
)
def test_disks_are_moved_one_by_one(moves, fault):
    lines = ["Move disk {} from Peg {} to Peg {}".format(*move.split()) for move in moves]
    expected = None if fault is None else (lines[fault[0]], fault[1])
    assert bad("tower_of_hanoi", "\n".join(lines)) == expected
    assert solved("tower_of_hanoi", "\n".join(lines)) == (fault is None)


def test_a_legal_start_is_no_solution_and_other_words_are_no_move():
    assert (bad("tower_of_hanoi", "Move disk 1 from Peg 1 to Peg 2"), solved("tower_of_hanoi", "")) == (None, False)
    assert bad("tower_of_hanoi", "So: Move disk 1 from Peg 1 to Peg 2")[1] == "no move"
    assert bad("tower_of_hanoi", "Move disk 1 from Peg 1 to Peg 2.")[1] == "no move"


def test_jugs_are_filled_emptied_and_poured():
    moves = ["fill B", "pour B->A", "empty A", "pour B->A", "fill B", "pour B->A"]
    assert solved("jugs", json.dumps(moves))
    assert not solved("jugs", json.dumps(moves[:-1]))
    assert bad("jugs", json.dumps([*moves[:2], "pour B->C"])) == ('"pour B->C"', "no such jug")
    assert bad("jugs", json.dumps([*moves[:2], "drink A"])) == ('"drink A"', "no move")
    assert bad("jugs", "fill B, pour B->A") == ("fill B, pour B->A", "no JSON list of moves")
    assert bad("jugs", '["fill A", 3]')[1] == "no JSON list of moves"


def test_ladders_change_one_letter_and_end_at_the_word():
    assert solved("word_ladder", "COLD,CORD,CARD,WARD,WARM")
    assert bad("word_ladder", "COLD,CORD,WARD,WARM") == ("WARD", "does not differ in one letter")
    assert bad("word_ladder", "CORD,CARD") == ("CORD", "is not COLD")
    assert bad("word_ladder", "COLD,CORDS") == ("CORDS", "has not 4 letters")
    assert not solved("word_ladder", "COLD,CORD,CARD,WARD")
    assert not solved("word_ladder", "COLD,,CORD,CARD,WARD,WARM")


def test_paths_stay_on_open_cells():
    assert solved("shortest_path", "right down right")
    assert bad("shortest_path", "right up") == ("up", "leaves the grid")
    assert bad("shortest_path", "down") == ("down", "runs into a blocked cell")
    assert bad("shortest_path", "right then down") == ("then", "no direction")
    assert bad("shortest_path", "infeasible") == ("infeasible", "there is a path")
    assert solved("shortest_path", "infeasible", WALLED)
    assert bad("shortest_path", "right", WALLED) == ("right", "runs into a blocked cell")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("94*4 - 61 - 6", None),
        ("(94 * 4) - (61 + 6)", None),
        ("94*4 - 61 - 61", ("61", "not among the numbers left")),
        ("94*4 - 61 - 7", ("7", "not among the numbers left")),
        ("94*4 - 61", ("94*4 - 61", "does not use all numbers")),
        ("94*4 - 61 + 6", ("94*4 - 61 + 6", "is not 309")),
        ("94*4 - 61 - 6 = 309", ("94*4 - 61 - 6 = 309", "no expression of numbers, + - * / and brackets")),
        ("94**4 - 61 - 6", ("94**4 - 61 - 6", "no expression of numbers, + - * / and brackets")),
        ("94*4 - 61 - 6 or 5", ("94*4 - 61 - 6 or 5", "no expression of numbers, + - * / and brackets")),
        ("94/(4-4) - 61 - 6", ("4", "not among the numbers left")),
    ],
)
def test_numbers_are_taken_once_and_give_the_target(answer, fault):
    assert bad("countdown", answer) == fault
    assert solved("countdown", answer) == (fault is None)


def test_the_numbers_of_puzzle24_are_those_given():
    assert solved("puzzle24", "10*(8 - 5) - 6")
    assert bad("puzzle24", "1*2*3*4") == ("1", "not among the numbers left")


def test_spans_are_the_moves_up_to_the_first_bad_one_where_they_stand():
    moves = "Move disk 1 from Peg 1 to Peg 2\n Move disk 2 from Peg 1 to Peg 2\nMove disk 1 from ?"
    text = f"Let me see.\n<answer>\n{moves}\n</answer>"
    entry = {"answer": "", "metadata": {"source_dataset": "tower_of_hanoi", **HANOI}}
    (verdict,) = GameMoves()([Sample("", text, metadata={"entry": entry})])
    assert verdict.score == pytest.approx(1 / 3)
    assert [(text[s.start : s.stop], s.score, s.label) for s in verdict.spans] == [
        ("Move disk 1 from Peg 1 to Peg 2", 1.0, "legal move"),
        ("Move disk 2 from Peg 1 to Peg 2", 0.0, "a smaller disk lies there"),
    ]


def test_other_problems_are_read_as_equations():
    entry = {"answer": "7", "metadata": {"source_dataset": "gsm_symbolic"}}
    text = "3 + 4 = 7 and 2 * 2 = 5, so <answer>7</answer>"
    verdicts = GameMoves()([Sample("", text, metadata=columns) for columns in ({"entry": entry}, {})])
    assert [v.score for v in verdicts] == [0.5, 0.5]
    assert [(text[s.start : s.stop], s.score) for s in verdicts[0].spans] == [("3 + 4 = 7", 1.0), ("2 * 2 = 5", 0.0)]


def test_no_answer_is_no_judgement():
    entry = {"answer": "", "metadata": {"source_dataset": "tower_of_hanoi", **HANOI}}
    verdicts = GameMoves()([Sample("", text, metadata={"entry": entry}) for text in ("", "um")])
    assert [verdict.score for verdict in verdicts] == [None, None]


PIECES = [
    *"ABC,()[]\"'\\*+-/0369\n ",
    "Move disk 1 from Peg 1 to Peg 2",
    "fill A",
    "COLD",
    "up",
    "<answer>",
    "</answer>",
]
TEXTS = st.text(st.characters(), max_size=60) | st.lists(st.sampled_from([*PIECES, "\ud83d"]), max_size=30).map("".join)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(text=TEXTS, game=st.sampled_from(sorted(GAMES)))
def test_any_text_is_played_without_a_fault(text, game):
    columns = {"entry": {"answer": None, "metadata": {"source_dataset": game, **FACTS[game]}}}
    samples = [Sample("", t, metadata=columns) for t in (text, f"<answer>{text}</answer>")]
    assert judge({"it": GameMoves()}, samples).errors == {"it": 0}


@pytest.mark.parametrize("game", sorted(GAMES))
@pytest.mark.parametrize(
    "unit", ["(", "[", '"', '["', "a,", "up ", "1+", " ", "\n", "Move disk 1 from Peg 1 to Peg 2\n"]
)
def test_a_hundred_thousand_characters_take_no_time(game, unit):
    text = unit * (100_000 // len(unit))
    began = time.process_time()
    play(game, text, FACTS[game])
    assert time.process_time() - began < 2


def right_answers(game, seed=5, size=12):
    gym = pytest.importorskip("reasoning_gym")
    options = {"tower_of_hanoi": {"max_disks": 4}, "jugs": {"difficulty": 5}}.get(game, {})
    dataset = gym.create_dataset(game, seed=seed, size=size, **options)
    return dataset, [dataset[place] for place in range(size)]


def changed(answer, rng):
    """The answer with some of its moves dropped, doubled, swapped or altered."""
    separator = next((mark for mark in ("\n", '", "', ",", " ") if mark in answer), "")
    moves = answer.split(separator) if separator else [answer]
    for _ in range(rng.randint(0, 2)):
        place = rng.randrange(len(moves))
        how = rng.randrange(5)
        if how == 0 and len(moves) > 1:
            del moves[place]
        elif how == 1:
            moves.insert(place, moves[place])
        elif how == 2:
            other = rng.randrange(len(moves))
            moves[place], moves[other] = moves[other], moves[place]
        else:
            letters = list(moves[place])
            spots = [k for k, letter in enumerate(letters) if letter.isalnum()]
            if spots:
                spot = rng.choice(spots)
                letters[spot] = rng.choice("0123456789" if letters[spot].isdigit() else "ABCDEL")
            moves[place] = "".join(letters)
    return separator.join(moves)


@pytest.mark.integration
@pytest.mark.parametrize("game", sorted(GAMES))
def test_solved_is_what_the_packages_own_scorer_says(game):
    """Right answers and altered ones: a game is solved here exactly where it is for the package."""
    dataset, entries = right_answers(game)
    rng, outcomes = random.Random(1), []
    for entry in entries:
        for _ in range(25):
            answer = changed(entry["answer"], rng)
            score = dataset.score_answer(answer, entry)
            here = play(game, answer, entry["metadata"])
            if game == "puzzle24" and score == 1.0 and not here.solved:
                assert here.fault != "is not 24"  # it does not look at which numbers are taken
                continue
            if here.fault == "cannot be read":  # two signs in a row, for one
                assert score < 1 or re.search(r"[-+*/(] *[-+*/)]", answer)
                continue
            paid = {"shortest_path": score >= 0.5, "tower_of_hanoi": score > 0.05}.get(game, score == 1.0)
            assert here.solved == paid, (answer, score, here)
            if game in ("tower_of_hanoi", "jugs") and answer:
                assert (here.bad is None) == (score > 0), (answer, score, here)
            outcomes.append(paid)
    assert 20 < sum(outcomes) < len(outcomes) - 20


@pytest.mark.integration
@pytest.mark.parametrize("game", ["tower_of_hanoi", "jugs", "word_ladder", "shortest_path"])
def test_a_move_that_was_put_wrong_is_the_one_that_is_found(game):
    """All before it is as in a right answer; what it says can never be a move."""
    separator = {"tower_of_hanoi": "\n", "jugs": '", "', "word_ladder": ",", "shortest_path": " "}[game]
    rng = random.Random(2)
    for entry in right_answers(game)[1]:
        moves = entry["answer"].split(separator)
        if moves == ["infeasible"]:
            continue
        place = rng.randrange(len(moves))
        moves[place] = moves[place].replace(moves[place].strip('[]" '), "QQQQQQQ")
        played = play(game, separator.join(moves), entry["metadata"])
        assert (played.bad, "QQQQQQQ" in played.pieces[place].text) == (place, True)
