"""TRL's ``GRPOTrainer`` with our verifiers for rewards and our strategies for credit; written against TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer

from ..credit import CreditStrategy, Rollout, assign_credit, collate
from ..credit.adaptive import observe
from ..credit.uniform import Uniform
from ..grpo.metrics import credit_metrics
from ..grpo.seeds import named_seed
from ..grpo.signals import available_signals
from ..grpo.task import Problem
from ..verifiers import InputError, Sample, Verdict
from ..verifiers.panel import Panel
from .samples import content_text, make_ready, make_sample

__all__ = ["CreditGRPOTrainer"]


class CreditGRPOTrainer(GRPOTrainer):
    """One pass of the verifiers gives TRL its rewards and the strategy its spans; the loss is TRL's own.

    The completions table shows what was trained on: its mean over each answer's tokens as ``advantage``, and the
    advantage of every trained token as ``token_advantages``.

    Args:
        strategy: assigns the credit, instead of ``scale_rewards`` and ``multi_objective_aggregation``.
        panel: the verifiers, and what each counts in the reward.
        reference: column of the data set with the right answer, or None.
        options: ``args``, and all else that ``GRPOTrainer`` takes, except reward functions.
    """

    def __init__(
        self, *, strategy: CreditStrategy, panel: Panel, reference: str | None = "answer", **options: Any
    ) -> None:
        _check(strategy, panel, options["args"])
        self.strategy, self.panel, self.reference = strategy, panel, reference
        options["args"].reward_weights = list(panel.reward_weights.values())
        super().__init__(reward_funcs=[_column(name) for name in panel.reward_weights], **options)
        make_ready(panel.verifiers)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        self._prompt_ids, self._tool_masks = generated[0], generated[2] or [None] * len(prompts)
        return generated

    def _calculate_rewards(self, inputs: Sequence[Mapping[str, Any]], *others: Any) -> Tensor:
        ends = (*self.eos_token_ids, self._tokenizer.pad_token_id)
        samples = [
            make_sample(self._tokenizer, ends, self._problem(columns), prompt, ids, limit=1, response_mask=mask)
            for columns, prompt, ids, mask in zip(inputs, self._prompt_ids, others[-1], self._tool_masks)
        ]
        judged = self.panel.judge(samples)
        for name, count in judged.errors.items():
            self._log_metric(f"verifier/errors_{name}", float(count))
        self._rollouts = [
            _rollout(sample, verdicts, self.panel.reward(verdicts), mask)
            for sample, verdicts, mask in zip(samples, judged.verdicts, self._tool_masks)
        ]
        scores = [[row[name].score for name in self.panel.reward_weights] for row in judged.verdicts]
        values = [[float("nan") if score is None else score for score in row] for row in scores]
        return self.accelerator.gather(torch.tensor(values, device=self.accelerator.device))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        size = self.num_generations if mode == "train" else self.num_generations_eval
        rollouts = gather_object(self._rollouts)  # a group may lie on several processes
        step = self.state.global_step
        batch = collate(
            [replace(rollout, group_id=row // size) for row, rollout in enumerate(rollouts)],
            mask_truncated=self.mask_truncated_completions,
            seed=named_seed(self.args.seed, "credit", step),
        )
        batch = replace(batch, old_logprobs=None, progress=step / max(self.state.max_steps, step + 1))
        streams: dict[str, Any] = {name: _like(rows, batch.completion_mask) for name, rows in self._streams(out)}
        batch = replace(batch, **streams)
        credit = assign_credit(self.strategy, batch)
        if mode == "train":
            observe(self.strategy, batch)
        # The policy's loss is linear in the advantage: a weight of the objective is a factor of it.
        values = credit.advantages if credit.loss_weight is None else credit.advantages * credit.loss_weight
        for name, value in credit_metrics(batch, credit).items():
            self._metrics[mode][name].append(value)
        logged = self._logs["advantages"]  # ends with what TRL would have trained on
        kept = list(logged)[: max(len(logged) - len(values), 0)]
        logged.clear()
        logged.extend([*kept, *(values.sum(dim=1) / batch.completion_mask.sum(dim=1).clamp(min=1)).tolist()])
        trained = [row[mask].tolist() for row, mask in zip(values, batch.completion_mask)]
        self._logs["extra"]["token_advantages"].extend(trained)
        first = self.accelerator.process_index * len(inputs)
        own = _like(values[first : first + len(inputs)], out["completion_ids"])
        return out | {"advantages": own.to(out["completion_ids"].device)}

    def _streams(self, out: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """What the strategy asks for of log-probabilities and entropies, over the rows of all processes."""
        found: dict[str, Any] = {"ref_logprobs": out.get("ref_per_token_logps")}
        if {"old_logprobs", "entropy"} & self.strategy.requires:
            if "num_images" in out:
                raise InputError(
                    f"{type(self.strategy).__name__} needs log-probabilities, which images do not have here"
                )
            ids, mask = (torch.cat([out[f"prompt_{x}"], out[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
            width = out["completion_ids"].shape[1]
            with torch.no_grad():
                scored = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, compute_entropy=True)
            found |= {"old_logprobs": scored[0], "entropy": scored[1]}
        rows = {name: gather_object(list(found[name].cpu())) for name in sorted(found.keys() & self.strategy.requires)}
        return [(name, pad_sequence(values, batch_first=True).float()) for name, values in rows.items()]

    def _problem(self, columns: Mapping[str, Any]) -> Problem:
        asked = columns["prompt"]
        answer = None if self.reference is None else columns.get(self.reference)
        facts = {name: value for name, value in columns.items() if name not in ("prompt", self.reference)}
        text = asked if isinstance(asked, str) else content_text(asked[-1]["content"])
        return Problem("", text, None if answer is None else str(answer), facts)


def _rollout(
    sample: Sample, verdicts: Mapping[str, Verdict], reward: float | None, mask: Sequence[int] | None
) -> Rollout:
    facts, ids = sample.metadata, sample.metadata["completion_ids"]
    shown = (facts["prompt_ids"], ids, [0.0] * len(ids), facts["offsets"], sample.completion)
    written = None if mask is None else [bool(one) for one in mask]
    return Rollout(*shown, 0, facts["truncated"], verdicts, reward, written)


def _like(values: Tensor, other: Tensor) -> Tensor:
    """The rows cut, or filled up with zeros, to the width of the other tensor."""
    width = other.shape[1]
    return torch.nn.functional.pad(values, (0, max(width - values.shape[1], 0)))[:, :width]


def _column(name: str) -> Any:
    """What TRL takes for a reward function: a name in its logs. The scores come from ``_calculate_rewards``."""

    def score(**_: Any) -> list[float]:
        raise AssertionError("the panel is asked, not its columns")

    score.__name__ = name
    return score


def _check(strategy: CreditStrategy, panel: Panel, args: Any) -> None:
    """Refuse before the model is loaded what TRL cannot give, or would undo."""
    available = available_signals(panel.verifiers, panel.reward_weights) | {"entropy"}
    available |= {"ref_logprobs"} if args.beta else set()
    missing = sorted((strategy.requires | ({"logprobs"} if strategy.phase == "update" else set())) - available)
    kind = type(strategy).__name__
    if missing or not panel.reward_weights:
        remedy = "set beta" if missing == ["ref_logprobs"] else "add the verifier to the panel, or use apportion train"
        raise InputError(f"{kind} needs {(missing or ['reward'])[0]}, which this trainer does not have; {remedy}")
    if args.scale_rewards not in ("group", True) or args.multi_objective_aggregation != "sum_then_normalize":
        raise InputError("scale_rewards, multi_objective_aggregation: have no effect; the strategy scales the credit")
    averaged = args.importance_sampling_level == "sequence" and args.loss_type not in ("cispo", "vespo")
    if averaged and not isinstance(strategy, Uniform):
        raise InputError(
            f"importance_sampling_level=sequence: averages the credit of {kind} over each answer; use token"
        )
