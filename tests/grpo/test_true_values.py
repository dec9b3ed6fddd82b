"""True advantages are those of brute force over every answer; what is pruned stays in its bound, what is sampled in its
error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from apportion.credit import CreditBatch, Rollout, collate
from apportion.credit.align import decode_text, token_offsets
from apportion.experiments.policies import symbol_tokenizer
from apportion.grpo.collect import collect
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import Interrupted, RolloutConfig
from apportion.grpo.task import Problem
from apportion.grpo.true_values import MonteCarloTruth, TreeTruth, Valuation
from apportion.verifiers import InputError, Sample, Span, Verdict
from apportion.verifiers.panel import Panel

CONFIG = RolloutConfig(prompts_per_step=2, group_size=6, max_new_tokens=4)
PROBLEMS = [Problem("a", "0"), Problem("b", "101")]
Ids = tuple[int, ...]


def little_policy(seed: int = 18) -> Policy:
    """A random Llama over five ids: padding, end, unknown, 0 and 1, of which it likes some far better than others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = symbol_tokenizer(("0", "1"))
    config = LlamaConfig(
        vocab_size=5,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    return Policy(model, tokenizer, lambda text: tokenizer.encode(text), (tokenizer.eos_token_id,))


def score(ids: Sequence[int], truncated: bool) -> float:
    """Some number from 0 to 1 that depends on every token."""
    return (sum((place + 2) * token for place, token in enumerate(ids)) + 3 * truncated) % 5 / 4


def answer(samples: Sequence[Sample]) -> list[Verdict]:
    return [Verdict(score(s.metadata["completion_ids"], s.metadata["truncated"])) for s in samples]


def steps(samples: Sequence[Sample]) -> list[Verdict]:
    """Each character is a step; a zero is wrong."""
    return [Verdict(1.0, tuple(Span(i, i + 1, float(c)) for i, c in enumerate(s.completion))) for s in samples]


PANEL = Panel({"answer": answer, "steps": steps, "truth": steps}, {"answer": 1.0})


@dataclass
class Brute:
    """Expected rewards by going through every answer, with one forward for each of its beginnings."""

    policy: Policy
    config: RolloutConfig = CONFIG
    reward: Callable[[Sequence[int], bool], float | None] = score
    known: dict[Ids, list[float]] = field(default_factory=dict)

    def chances(self, ids: Ids) -> list[float]:
        """Of every next token: tempered, then the top_k likeliest of them, then the likeliest that make up top_p."""
        if ids not in self.known:
            with torch.no_grad():
                logits = self.policy.model(torch.tensor([ids])).logits[0, -1]
            chance = (logits.double() / self.config.temperature).softmax(dim=0).tolist()
            ranked = sorted(range(len(chance)), key=lambda token: -chance[token])[: self.config.top_k or None]
            kept: list[int] = []
            for token in ranked:
                if sum(chance[t] for t in kept) < self.config.top_p * sum(chance[t] for t in ranked):
                    kept.append(token)
            whole = sum(chance[t] for t in kept)
            self.known[ids] = [chance[t] / whole if t in kept else 0.0 for t in range(len(chance))]
        return self.known[ids]

    def answers(self, prompt: Ids, prefix: Ids = ()) -> list[tuple[float, Ids, bool]]:
        """Probability, ids, and whether the limit cut it, of all answers that begin with ``prefix``."""
        if prefix and prefix[-1] in self.policy.eos_ids:
            return [(1.0, prefix, False)]
        if len(prefix) == self.config.max_new_tokens:
            return [(1.0, prefix, True)]
        return [
            (chance * below, ids, cut)
            for token, chance in enumerate(self.chances((*prompt, *prefix)))
            if chance
            for below, ids, cut in self.answers(prompt, (*prefix, token))
        ]

    def value(self, prompt: Ids, prefix: Ids) -> float:
        """Mean reward of the answers that begin with ``prefix``, those without one left out."""
        rated = [
            (p, reward) for p, ids, cut in self.answers(prompt, prefix) if (reward := self.reward(ids, cut)) is not None
        ]
        return sum(p * reward for p, reward in rated) / sum(p for p, _ in rated)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return little_policy()


def rolled(policy: Policy, config: RolloutConfig = CONFIG, panel: Panel = PANEL) -> list[Rollout]:
    return collect(policy, PROBLEMS, panel, config, seed=1, step=1).rollouts


def every_answer(brute: Brute, problem: int = 0) -> tuple[list[Rollout], torch.Tensor]:
    """All answers to a problem as rollouts, and their probabilities."""
    policy, prompt = brute.policy, tuple(brute.policy.encode(PROBLEMS[problem].prompt))
    rollouts, chances = [], []
    for chance, ids, cut in brute.answers(prompt):
        text = decode_text(policy.tokenizer, list(ids))
        logprobs = [brute.chances((*prompt, *ids[:at]))[token] for at, token in enumerate(ids)]
        offsets = token_offsets(policy.tokenizer, list(ids), text)
        logs = torch.tensor(logprobs).log().tolist()
        spans = steps([Sample("", text)])[0]
        rollouts.append(
            Rollout(
                prompt, ids, logs, offsets, text, problem, cut, {"steps": spans, "truth": spans}, brute.reward(ids, cut)
            )
        )
        chances.append(chance)
    return rollouts, torch.tensor(chances, dtype=torch.float64)


def value(
    policy: Policy,
    method: TreeTruth | MonteCarloTruth,
    rollouts: Sequence[Rollout],
    batch: CreditBatch | None = None,
    config: RolloutConfig = CONFIG,
    panel: Panel = PANEL,
    problems: Sequence[Problem] = PROBLEMS,
    **options: Any,
) -> Valuation:
    batch = collate(rollouts) if batch is None else batch
    return method(policy, problems, rollouts, batch, panel, config, **{"seed": 5, **options})


def brute_advantages(brute: Brute, rollout: Rollout, units: Sequence[int]) -> dict[int, float]:
    """By unit what it changed, from the unit of each token (-1 for none)."""
    begins = {unit: units.index(unit) for unit in units if unit >= 0}
    ends = [*list(begins.values())[1:], len(rollout.completion_ids)]
    prompt, ids = tuple(rollout.prompt_ids), tuple(rollout.completion_ids)

    def worth(length: int) -> float:
        if length < len(ids):
            return brute.value(prompt, ids[:length])
        assert rollout.reward is not None
        return rollout.reward

    return {unit: worth(end) - worth(begin) for (unit, begin), end in zip(begins.items(), ends)}


SAMPLINGS = [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.5}]


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
@pytest.mark.parametrize("units", ["steps", "tokens"])
def test_the_whole_tree_is_brute_force(policy: Policy, units: str, options: dict[str, Any]) -> None:
    config = replace(CONFIG, **options)
    rollouts, brute = rolled(policy, config), Brute(policy, config)
    found = value(policy, TreeTruth(tau=0, units=units, eps=0), rollouts, config=config)
    checked = 0
    for row, rollout in enumerate(rollouts):
        ids = found.truth.unit_ids[row, : len(rollout.completion_ids)].tolist()
        for unit, expected in brute_advantages(brute, rollout, ids).items():
            assert float(found.truth.advantage[row, unit]) == pytest.approx(expected, abs=1e-6)
            checked += 1
    assert checked == int((~found.truth.advantage.isnan()).sum()) > 15
    assert found.metrics["truth/uncovered_max"] < 1e-12
    assert found.bound is not None
    assert found.bound.nan_to_num().max() < 1e-9
    assert found.truth.standard_error.nan_to_num().eq(0).all()
    assert found.halves is None
    assert any(rollout.truncated for rollout in rollouts)
    assert not all(rollout.truncated for rollout in rollouts)


@pytest.mark.parametrize("method", [TreeTruth(tau=0.1), MonteCarloTruth(num_samples=3)], ids=["tree", "sampled"])
def test_an_answers_steps_sum_to_its_reward_less_the_prompts_value(policy: Policy, method: Any) -> None:
    rollouts = rolled(policy)
    truth = value(policy, method, rollouts).truth
    start = [float(r.reward or 0) - float(a.nansum()) for r, a in zip(rollouts, truth.advantage)]
    rows = [row for row, rollout in enumerate(rollouts) if rollout.text]  # without a step there is no unit
    for group in (0, 1):
        own = [start[row] for row in rows if rollouts[row].group_id == group]
        assert own == pytest.approx([own[0]] * len(own))
    assert [bool(unit.ge(0).any()) for unit in truth.unit_ids] == [bool(rollout.text) for rollout in rollouts]


def test_over_all_answers_the_advantages_are_nothing(policy: Policy) -> None:
    """As a whole, and of every token given what stands before it."""
    rollouts, chance = every_answer(Brute(policy))
    assert len(rollouts) == 341
    truth = value(policy, TreeTruth(tau=0, units="tokens", eps=0), rollouts).truth
    assert float((chance * truth.advantage.nansum(dim=1)).sum()) == pytest.approx(0, abs=1e-6)
    by_token, below = truth.by_token(), defaultdict(float)
    for row, rollout in enumerate(rollouts):
        for at in range(len(rollout.completion_ids)):
            below[rollout.completion_ids[:at]] += float(chance[row] * by_token[row, at])
    assert len(below) == 85
    assert max(map(abs, below.values())) < 1e-6


@pytest.mark.parametrize("weight", [1.0, -2.0])
@pytest.mark.parametrize("units", ["steps", "tokens"])
def test_pruned_advantages_keep_their_bound(policy: Policy, units: str, weight: float) -> None:
    panel = replace(PANEL, reward_weights={"answer": weight})
    rollouts = rolled(policy, panel=panel)
    exact = value(policy, TreeTruth(tau=0, units=units, eps=0), rollouts, panel=panel).truth.advantage
    known, uncovered, tightest = ~exact.isnan(), [], []
    for tau in (0.3, 0.1, 0.03, 0.01, 0.001):
        pruned = value(policy, TreeTruth(tau=tau, units=units, eps=0), rollouts, panel=panel)
        assert pruned.bound is not None
        off = (pruned.truth.advantage - exact).abs()[known]
        assert (off <= pruned.bound[known] + 1e-6).all()
        tightest.append(float((off / pruned.bound[known]).max()))
        uncovered.append(pruned.metrics["truth/uncovered_max"])
        assert pruned.bound[known].max() <= abs(weight) * uncovered[-1] + 1e-9
    assert uncovered == sorted(uncovered, reverse=True)
    assert uncovered[0] > 0.2 > 0.05 > uncovered[-1] > 0
    assert max(tightest) > 0.3  # the bound says something


def test_tokens_that_were_nearly_certain_are_worth_nothing_and_the_others_keep_their_bound(policy: Policy) -> None:
    eps = 0.3
    rollouts, _ = every_answer(Brute(policy))
    exact = value(policy, TreeTruth(tau=0, units="tokens", eps=0), rollouts).truth.by_token()
    found = value(policy, TreeTruth(tau=0, units="tokens", eps=eps), rollouts)
    chance = collate(rollouts).old_logprobs.double().exp()  # type: ignore[union-attr]
    inert, units = found.truth.inert, found.truth.unit_ids
    trained = collate(rollouts).completion_mask
    assert torch.equal(inert, trained & (chance >= 1 - eps))
    assert torch.equal(units >= 0, trained & ~inert)
    assert inert.any()
    assert (exact.abs() <= 1 - chance + 1e-6)[inert].all()
    assert found.truth.by_token()[inert].eq(0).all()
    assert found.bound is not None
    bound = found.bound.gather(1, units.clamp(min=0))
    off = (found.truth.by_token() - exact).abs()
    assert (off <= bound + 1e-6)[units >= 0].all()
    assert 0 < off[units >= 0].max() <= found.metrics["truth/drift"] + 1e-6


def test_sampled_advantages_are_off_by_their_standard_errors(policy: Policy) -> None:
    rollouts, _ = every_answer(Brute(policy))
    exact = value(policy, TreeTruth(tau=0, units="tokens", eps=0), rollouts).truth
    found = value(policy, MonteCarloTruth(num_samples=40, units="tokens", eps=0), rollouts)
    assert torch.equal(found.truth.unit_ids, exact.unit_ids)
    known = ~exact.advantage.isnan()
    _, distinct = torch.unique(exact.advantage[known], return_inverse=True)  # equal ones are one estimate
    first = torch.stack([(distinct == one).nonzero()[0, 0] for one in range(int(distinct.max()) + 1)])
    assert found.halves is not None
    assert found.halves.again is not None
    off = {
        "whole": (found.truth.advantage - exact.advantage) / found.truth.standard_error,
        "half": (found.halves.advantage - exact.advantage) / found.halves.standard_error,
        "again": (found.halves.again - exact.advantage) / found.halves.standard_error,
    }
    z = {name: column[known][first] for name, column in off.items()}
    open_ends = found.truth.standard_error[known][first] > 0.02  # of those that hardly vary the error is overstated
    assert open_ends.sum() > 100
    for name, column in z.items():
        assert column.abs().max() < 4, name
        assert 0.85 < float(column[open_ends].square().mean().sqrt()) < 1.15, name
    assert abs(float(torch.corrcoef(torch.stack([z["half"], z["again"]]))[0, 1])) < 0.15
    mean = (found.halves.advantage + found.halves.again) / 2
    torch.testing.assert_close(found.truth.advantage, mean, equal_nan=True)
    assert found.truth.again is None


def test_none_of_many_is_no_certainty(policy: Policy) -> None:
    panel = replace(PANEL, verifiers={**PANEL.verifiers, "answer": lambda samples: [0.0] * len(samples)})
    rollouts = rolled(policy, panel=panel)
    truth = value(policy, MonteCarloTruth(num_samples=4), rollouts, panel=panel).truth
    known = ~truth.advantage.isnan()
    assert truth.advantage[known].eq(0).all()
    one = (1 / 10 * 9 / 10 / 10) ** 0.5  # p (1 - p) / n of 0 in 8 and two more
    assert set(truth.standard_error[known].round(decimals=6).tolist()) <= {round(one, 6), round(2**0.5 * one, 6)}


@pytest.mark.parametrize("method", [TreeTruth(tau=0.01), MonteCarloTruth(num_samples=2)], ids=["tree", "sampled"])
def test_a_state_is_valued_once_for_all_answers_that_share_it(policy: Policy, method: Any) -> None:
    rollouts = rolled(policy)
    alone, twins = (value(policy, method, rows) for rows in (rollouts, [*rollouts, *rollouts]))
    assert alone.tokens == twins.tokens
    assert alone.metrics["cost/value_states"] == twins.metrics["cost/value_states"]
    torch.testing.assert_close(twins.truth.advantage[12:], alone.truth.advantage, equal_nan=True)
    starts = {
        (rollout.group_id, tuple(rollout.completion_ids[: units.index(unit)]))
        for rollout, units in zip(rollouts, alone.truth.unit_ids.tolist())
        for unit in units
        if unit >= 0
    }
    assert alone.metrics["cost/value_states"] == len(starts)


def test_the_tree_depends_neither_on_the_rows_read_together_nor_on_the_other_answers(policy: Policy) -> None:
    rollouts = rolled(policy)
    whole = value(policy, TreeTruth(tau=0.01, units="tokens"), rollouts)
    for rows in (1, 3):
        apart = value(policy, TreeTruth(tau=0.01, units="tokens", rows=rows), rollouts)
        torch.testing.assert_close(apart.truth.advantage, whole.truth.advantage, equal_nan=True, atol=1e-6, rtol=0)
        assert apart.tokens == whole.tokens
    exact = TreeTruth(tau=0, units="tokens")
    alone = value(policy, exact, rollouts[4:5]).truth.by_token()[0]
    together = value(policy, exact, rollouts).truth.by_token()[4, : len(alone)]
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", [TreeTruth(tau=0), MonteCarloTruth(num_samples=20)], ids=["tree", "sampled"])
def test_answers_on_which_all_abstain_are_left_out(policy: Policy, method: Any) -> None:
    def shy(ids: Sequence[int], truncated: bool) -> float | None:
        return None if ids[0] == 4 and len(ids) > 2 else score(ids, truncated)

    def shy_answer(samples: Sequence[Sample]) -> list[Verdict]:
        return [Verdict(shy(s.metadata["completion_ids"], s.metadata["truncated"])) for s in samples]

    panel = replace(PANEL, verifiers={**PANEL.verifiers, "answer": shy_answer})
    brute = Brute(policy, reward=shy)
    rollouts, _ = every_answer(brute)
    rollouts = rollouts[::4]
    truth = value(policy, replace(method, units="tokens", eps=0), rollouts, panel=panel).truth
    judged = [rollout.reward is not None for rollout in rollouts]
    assert truth.unit_ids.ge(0).any(dim=1).tolist() == judged
    assert truth.advantage.isnan().all(dim=1).logical_not().tolist() == judged
    assert truth.wrong.any(dim=1)[~torch.tensor(judged)].any()  # what is wrong is known all the same
    checked = 0
    for row in (row for row, known in enumerate(judged) if known):
        ids = truth.unit_ids[row, : len(rollouts[row].completion_ids)].tolist()
        for unit, expected in brute_advantages(brute, rollouts[row], ids).items():
            assert (
                abs(float(truth.advantage[row, unit]) - expected) <= 4 * float(truth.standard_error[row, unit]) + 1e-6
            )
            checked += 1
    assert checked > 40


def test_the_halves_know_the_same_units(policy: Policy) -> None:
    """Where all continuations of one estimate were abstained on, there is nothing to compare."""

    def rare(samples: Sequence[Sample]) -> list[float | None]:
        return [1.0 if sum(s.metadata["completion_ids"]) % 3 == 0 else None for s in samples]

    panel = replace(PANEL, verifiers={**PANEL.verifiers, "answer": rare})
    rollouts, _ = every_answer(Brute(policy))
    found = value(policy, MonteCarloTruth(num_samples=1), rollouts, panel=panel)
    assert found.halves is not None
    assert found.halves.again is not None
    both, whole = ~found.halves.advantage.isnan(), ~found.truth.advantage.isnan()
    assert not found.halves.again[both].isnan().any()
    assert 0 < both.sum() < whole.sum()
    for truth, known in ((found.halves, both), (found.truth, whole)):
        units = {(row, unit) for row, ids in enumerate(truth.unit_ids.tolist()) for unit in ids if unit >= 0}
        assert units == set(map(tuple, known.nonzero().tolist()))


@pytest.mark.parametrize("method", [TreeTruth(), MonteCarloTruth(num_samples=2)], ids=["tree", "sampled"])
@pytest.mark.parametrize("units", ["steps", "tokens"])
def test_rows_left_out_of_training_cost_nothing(policy: Policy, method: Any, units: str) -> None:
    rollouts = [replace(rollout, truncated=True) for rollout in rolled(policy)]
    found = value(policy, replace(method, units=units), rollouts, collate(rollouts, mask_truncated=True))
    assert found.tokens == 0
    assert found.panel.verdicts == []
    assert found.truth.unit_ids.eq(-1).all()
    assert found.truth.advantage.isnan().all()
    assert not found.truth.inert.any()


def test_wrong_tokens_are_those_of_the_verifier_that_knows(policy: Policy) -> None:
    rollouts = rolled(policy)
    zero = policy.encode("0")[0]
    expected = [[token == zero for token in rollout.completion_ids] for rollout in rollouts]
    truth = value(policy, TreeTruth(tau=0.3), rollouts).truth
    for row, tokens in enumerate(expected):
        assert truth.wrong[row].tolist() == tokens + [False] * (truth.wrong.shape[1] - len(tokens))
    assert not value(policy, TreeTruth(tau=0.3, truth=None), rollouts).truth.wrong.any()
    with pytest.raises(InputError, match=r"verifiers\.oracle; the batch has spans of: "):
        value(policy, TreeTruth(tau=0.3, truth="oracle"), rollouts)


def test_equal_prompts_of_two_problems_are_judged_apart(policy: Policy) -> None:
    problems = [replace(PROBLEMS[0], reference="kind"), Problem("c", PROBLEMS[0].prompt, "strict")]

    def by_reference(samples: Sequence[Sample]) -> list[float]:
        return [float(s.reference == "kind") for s in samples]

    panel = replace(PANEL, verifiers={**PANEL.verifiers, "answer": by_reference})
    rollouts = collect(policy, problems, panel, CONFIG, seed=1, step=1).rollouts
    found = value(policy, TreeTruth(tau=0), rollouts, panel=panel, problems=problems)
    assert found.truth.advantage.nan_to_num().abs().max() < 1e-6


def test_a_request_to_stop_is_obeyed_and_the_model_is_left_as_it_was(policy: Policy) -> None:
    rollouts, asked = rolled(policy), iter([False, False, True])
    policy.model.train()
    try:
        with pytest.raises(Interrupted):
            value(policy, TreeTruth(tau=0), rollouts, should_stop=lambda: next(asked))
        assert policy.model.training
    finally:
        policy.model.eval()


def test_faults_of_verifiers_are_handed_on(policy: Policy) -> None:
    def broken(samples: Sequence[Sample]) -> list[float]:
        raise RuntimeError("no")

    panel, rollouts = replace(PANEL, verifiers={**PANEL.verifiers, "answer": broken}), rolled(policy)
    for method in (TreeTruth(tau=0.1), MonteCarloTruth(num_samples=1)):
        found = value(policy, method, rollouts, panel=panel)
        assert found.panel.errors["answer"] == len(found.panel.verdicts) > 0
        assert found.panel.faulted["answer"] == list(range(len(found.panel.verdicts)))


def test_what_cannot_be_true_is_refused(policy: Policy) -> None:
    rollouts = rolled(policy)
    tooled = [*rollouts[:3], replace(rollouts[3], model_mask=[False] * len(rollouts[3].completion_ids))]
    short = replace(CONFIG, max_new_tokens=2)
    generous = replace(PANEL, verifiers={**PANEL.verifiers, "answer": lambda samples: [3.0] * len(samples)})
    blind = replace(collate(rollouts), old_logprobs=None)
    for method in (TreeTruth(), MonteCarloTruth()):
        with pytest.raises(InputError, match="rollout 3: the policy did not write all of it"):
            value(policy, method, tooled)
        with pytest.raises(InputError, match=r"has [34] tokens, over rollout\.max_new_tokens=2"):
            value(policy, method, rollouts, config=short)
        with pytest.raises(InputError, match="old_logprobs"):
            value(policy, method, rollouts, blind)
    with pytest.raises(InputError, match=r"truth\.reward_range: rewards reach from 0 to 3, beyond \[0\.0, 1\.0\]"):
        value(policy, TreeTruth(tau=0.1), rollouts, panel=generous)
    wide = TreeTruth(tau=0.1, reward_range=(0.0, 3.0))
    assert value(policy, wide, rollouts, panel=generous).metrics["truth/uncovered"] > 0
    with pytest.raises(InputError, match=r"truth\.tau=0: the tree of answers has over truth\.max_nodes=40 nodes"):
        value(policy, TreeTruth(tau=0, max_nodes=40), rollouts)


def test_bad_options_are_refused() -> None:
    for method, options, message in (
        (TreeTruth, {"tau": 1.0}, r"truth\.tau=1\.0: is a probability"),
        (TreeTruth, {"eps": -0.1}, r"truth\.eps=-0\.1: is a probability"),
        (TreeTruth, {"rows": 0}, r"truth\.rows=0: must be at least 1"),
        (TreeTruth, {"reward_range": (1.0, 0.0)}, r"truth\.reward_range=\[1\.0, 0\.0\]"),
        (MonteCarloTruth, {"num_samples": 0}, r"truth\.num_samples=0: must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            method(**options)
