"""Scores of given completions do not depend on what stands beside them."""

from __future__ import annotations

import math

import pytest
import torch

from apportion.grpo.forward import score_completions, score_in_parts
from apportion.grpo.policy import Policy

COMPLETIONS = [[7, 8, 9, 1], [10], [11, 12, 13, 14, 15, 16, 17]]


def one_by_one(policy: Policy, prompt: list[int], completion: list[int], temperature: float) -> tuple[list, list]:
    """The plain way: one row, one token after the other."""
    logprobs, entropies = [], []
    for at, token in enumerate(completion):
        logits = policy.model(input_ids=torch.tensor([prompt + completion[:at]])).logits[0, -1].double()
        distribution = (logits / temperature).log_softmax(-1)
        logprobs.append(distribution[token].item())
        entropies.append(-(distribution.exp() * distribution).sum().item())
    return logprobs, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_equal_a_plain_loop_over_rows_and_tokens(
    policy: Policy, prompts: list[list[int]], temperature: float
) -> None:
    scored = score_completions(policy, prompts, COMPLETIONS, width=9, temperature=temperature)
    for row, (prompt, completion) in enumerate(zip(prompts, COMPLETIONS)):
        logprobs, entropies = one_by_one(policy, prompt, completion, temperature)
        length = len(completion)
        assert scored.logprobs[row, :length].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert scored.entropy[row, :length].tolist() == pytest.approx(entropies, abs=1e-5)
        assert not scored.logprobs[row, length:].any()
        assert not scored.entropy[row, length:].any()


def test_neither_padding_nor_neighbours_nor_the_cut_into_parts_change_a_row(
    policy: Policy, prompts: list[list[int]]
) -> None:
    whole = score_in_parts(policy, prompts, COMPLETIONS, temperature=1.0, rows=3).logprobs
    for rows in (1, 2):
        parts = score_in_parts(policy, prompts, COMPLETIONS, temperature=1.0, rows=rows).logprobs
        assert torch.allclose(parts, whole, atol=1e-6)
    turned = score_in_parts(policy, prompts[::-1], COMPLETIONS[::-1], temperature=1.0, rows=3).logprobs.flip(0)
    assert torch.allclose(turned, whole, atol=1e-6)
    assert not whole.requires_grad


def test_the_entropy_of_a_policy_without_preferences_is_the_log_of_its_vocabulary(policy: Policy) -> None:
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    scored = score_completions(policy, [[4, 5]], [[6, 7]], width=2)
    size = policy.model.config.vocab_size
    assert scored.entropy[0].tolist() == pytest.approx([math.log(size)] * 2)
    assert scored.logprobs[0].tolist() == pytest.approx([-math.log(size)] * 2)


def test_gradients_flow_through_log_probabilities_and_not_through_entropy(policy: Policy) -> None:
    scored = score_completions(policy, [[4, 5]], [[6, 7]], width=2)
    assert scored.logprobs.requires_grad
    assert not scored.entropy.requires_grad


def test_prompts_do_not_count_as_completion(policy: Policy) -> None:
    """Moving the border between prompt and completion moves the window of scores and changes none of them."""
    text = [4, 5, 6, 7, 8]
    early = score_completions(policy, [text[:1]], [text[1:]], width=4).logprobs[0]
    late = score_completions(policy, [text[:3]], [text[3:]], width=4).logprobs[0]
    assert torch.allclose(early[2:], late[:2], atol=1e-6)
    assert not late[2:].any()
