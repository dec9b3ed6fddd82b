"""Random streams have names."""

from __future__ import annotations

from apportion.grpo.seeds import named_generator, named_seed


def test_a_stream_is_a_function_of_its_name() -> None:
    assert named_generator(3, "data", 7).random() == named_generator(3, "data", 7).random()
    assert named_seed(0, "sample", 1, "7+9=?", 0) == 652223908090336076
    assert 0 <= named_seed(0, "x") < 2**63


def test_different_names_never_spell_the_same() -> None:
    names = [(0, "a", "b"), (0, "a/b"), (0, "a~1b"), (0, "a", "", "b"), (0, "a/", "b"), (0, "a", "/b"), (1, "a", "b")]
    assert len({named_seed(*name) for name in names}) == len(names)


def test_half_a_surrogate_pair_is_a_name_too() -> None:
    assert named_seed(0, "\ud83d") != named_seed(0, "\ud83e")
