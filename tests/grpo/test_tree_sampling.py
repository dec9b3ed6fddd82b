"""Answers of a tree share their beginnings, token for token, and each is a full completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from apportion.grpo.forward import score_completions
from apportion.grpo.policy import ForwardCounter, Policy
from apportion.grpo.sampling import Interrupted, sample_groups
from apportion.grpo.seeds import named_seed
from apportion.grpo.tree_sampling import TreeRolloutConfig, TreeSamples, sample_trees
from apportion.verifiers import InputError

CONFIG = TreeRolloutConfig(group_size=12, branching=(3, 2, 2), segment_tokens=3, max_new_tokens=12)
SEEDS = [11, 12, 13]


def sample(policy: Policy, prompts: list[list[int]], config: TreeRolloutConfig = CONFIG, **options: Any) -> TreeSamples:
    return sample_trees(policy, prompts, SEEDS[: len(prompts)], config, **options)


@pytest.fixture
def endless(policy: Policy, prompts: list[list[int]]) -> Policy:
    """The policy with an end token that is never the likeliest one, to be sampled with ``top_k=1``."""
    for end in range(len(policy.tokenizer)):
        patient = replace(policy, eos_ids=(end,))
        rows = sample_groups(patient, prompts, SEEDS, group_size=1, max_new_tokens=12, top_k=1)
        if all(row.truncated for row in rows):
            return patient
    raise AssertionError("every id is the likeliest one somewhere")


def segments(samples: TreeSamples, row: int) -> list[tuple[int, int, int]]:
    tree = samples.tree
    return [
        (int(node), int(start), int(stop))
        for node, start, stop in zip(tree.node[row], tree.start[row], tree.stop[row])
        if node >= 0
    ]


def test_a_node_is_one_segment_of_one_prompt_wherever_it_stands(policy: Policy, prompts: list[list[int]]) -> None:
    samples = sample(policy, prompts)
    seen: dict[int, tuple[int, tuple[int, ...], tuple[float, ...]]] = {}
    above: dict[int, int] = {}
    for row, generation in enumerate(samples.generations):
        parent = -1 - samples.prompt[row]
        for node, _, stop in segments(samples, row):
            # What a node holds, from the first token on; its parent.
            held = (samples.prompt[row], tuple(generation.ids[:stop]), tuple(generation.logprobs[:stop]))
            assert seen.setdefault(node, held) == held
            assert above.setdefault(node, parent) == parent
            parent = node
    leaves = [segments(samples, row)[-1][0] for row in range(len(samples.generations))]
    assert len(set(leaves)) == len(leaves)
    children: dict[int, int] = {}
    for parent in above.values():
        children[parent] = children.get(parent, 0) + 1
    for parent, count in children.items():
        depth = 0 if parent < 0 else 1 + next(d for d in range(3) if (samples.tree.node[:, d] == parent).any())
        assert count == CONFIG.branching[depth]


def test_segments_tile_the_answer(policy: Policy, prompts: list[list[int]]) -> None:
    samples = sample(policy, prompts)
    for row, generation in enumerate(samples.generations):
        borders = [(start, stop) for _, start, stop in segments(samples, row)]
        assert [start for start, _ in borders] == [0, 3, 6][: len(borders)]
        assert [stop for _, stop in borders] == [*[3, 6][: len(borders) - 1], len(generation.ids)]
        assert len(generation.logprobs) == len(generation.ids) <= 12


def test_an_end_token_ends_an_answer_whatever_the_depth_and_gives_one_row(
    policy: Policy, prompts: list[list[int]]
) -> None:
    # With every second id an end token nearly all answers end early.
    early = replace(policy, eos_ids=tuple(range(0, len(policy.tokenizer), 2)))
    samples = sample(early, prompts)
    depths = [len(segments(samples, row)) for row in range(len(samples.generations))]
    assert {1, 2, 3} >= set(depths)
    assert 1 in depths
    for generation in samples.generations:
        ended = generation.ids[-1] in early.eos_ids
        assert not any(token in early.eos_ids for token in generation.ids[:-1])
        assert generation.truncated == (not ended)
        assert ended or len(generation.ids) == 12
    for prompt in range(3):  # a child of the prompt has one leaf, or those of two children with one or two each
        rows = [row for row, of in enumerate(samples.prompt) if of == prompt]
        first = {int(samples.tree.node[row, 0]) for row in rows}
        assert len(first) == 3
        assert len(rows) <= 12


def test_a_tree_without_early_ends_has_all_its_leaves(endless: Policy, prompts: list[list[int]]) -> None:
    samples = sample(endless, prompts, replace(CONFIG, top_k=1))
    assert samples.prompt == [0] * 12 + [1] * 12 + [2] * 12
    assert all(generation.truncated and len(generation.ids) == 12 for generation in samples.generations)
    assert samples.tree.node[:12, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_log_probabilities_are_those_of_the_policy(policy: Policy, prompts: list[list[int]]) -> None:
    samples = sample(policy, prompts)
    rows = [prompts[prompt] for prompt in samples.prompt]
    ids = [generation.ids for generation in samples.generations]
    with torch.no_grad():
        scored = score_completions(policy, rows, ids, width=12).logprobs
    for row, generation in enumerate(samples.generations):
        assert generation.logprobs == pytest.approx(scored[row, : len(generation.ids)].tolist(), abs=1e-4)


def test_a_path_is_what_the_plain_sampler_draws_with_the_same_numbers(policy: Policy, prompts: list[list[int]]) -> None:
    samples = sample(policy, prompts)
    row = 0
    prefix: list[int] = []
    for depth, (_, start, stop) in enumerate(segments(samples, row)):
        limit = 3 if depth < 2 else 6
        seed = named_seed(SEEDS[0], *([0] * (depth + 1)))
        (again,) = sample_groups(policy, [[*prompts[0], *prefix]], [seed], group_size=1, max_new_tokens=limit)
        assert again.ids == samples.generations[row].ids[start:stop]
        prefix += again.ids


def test_a_tree_depends_on_its_own_seed_alone(policy: Policy, prompts: list[list[int]]) -> None:
    together, alone = sample(policy, prompts), sample_trees(policy, prompts[1:2], SEEDS[1:2], CONFIG)
    ids = [g.ids for g, prompt in zip(together.generations, together.prompt) if prompt == 1]
    assert ids == [g.ids for g in alone.generations]
    other = sample_trees(policy, prompts[1:2], [99], CONFIG)
    assert ids != [g.ids for g in other.generations]


def test_shared_segments_are_sampled_once(endless: Policy, prompts: list[list[int]]) -> None:
    counter, rows = ForwardCounter(), []
    handle = endless.model.register_forward_hook(
        lambda *call: rows.append(call[2]["input_ids"].shape[0]), with_kwargs=True
    )
    with counter.counting(endless.model):
        samples = sample(endless, prompts, replace(CONFIG, top_k=1))
    handle.remove()
    assert samples.num_tokens == 3 * (3 * 3 + 6 * 3 + 12 * 6)
    # Each depth: the open paths are read, then all of their children but for the last token.
    assert rows == [3, 9, 9, 9, 18, 18, 18, *[36] * 5]
    assert counter.take() == len(rows)


def test_a_request_to_stop_is_obeyed(policy: Policy, prompts: list[list[int]]) -> None:
    with pytest.raises(Interrupted):
        sample(policy, prompts, should_stop=lambda: True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"branching": ()}, "needs at least one number"),
        ({"branching": (0, 8)}, "each at least 1"),
        ({"branching": (2, 2)}, r"makes 4 answers; set rollout\.group_size=4, not 8"),
        ({"segment_tokens": 0}, r"rollout\.segment_tokens=0"),
        ({"segment_tokens": 24}, "the last of 3 segments begins at token 48"),
    ],
)
def test_shapes_that_make_no_tree_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TreeRolloutConfig(**{"group_size": 8, "max_new_tokens": 48, **options})
