"""An implicit reward model that learns beside the policy, from the outcomes of its rollouts (PRIME)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..credit import CreditBatch, Rollout
from ..credit.implicit import pairwise_accuracy
from ..prm.implicit import outcome_loss
from ..prm.tokenizing import tokenizer_fingerprint
from ..verifiers import InputError
from .files import one_line
from .forward import score_completions, score_in_parts
from .policy import ForwardCounter, Policy
from .sampling import RolloutConfig
from .scorers import scored_rows, trained_rows
from .update import OptimConfig

__all__ = ["ImplicitPrm"]


@dataclass(eq=False)
class ImplicitPrm:
    """``q_t = log pi_phi(y_t) - log pi_ref(y_t)`` of a language model phi that learns from outcomes (arXiv 2502.01456).

    phi begins as a copy of the policy's start, which is the reference. On every rollout batch it takes ``updates``
    steps of AdamW (no weight decay) down the mean over the answers of the cross-entropy of ``sigmoid(beta sum_t q_t)``
    and the outcome. Of the paper are beta .05, the clip at 10, one step a batch, no weight decay, and a learning rate
    of twice the policy's: 1e-6 beside 5e-7 for 7B models. Its script learns ``after`` it scored a batch, so that no
    score has seen its own answer's outcome; verl's learns ``before``.

    It logs, of each batch before it learned from it, ``loss`` (nats; ln 2 of a model that knows nothing) and
    ``accuracy``, the share of pairs of one group with different outcomes in which the better answer has the larger
    sum; further ``grad_norm`` of the last step, before the cut, and ``skipped_updates``.

    Args:
        beta: of the loss; the scores bear none.
        lr: learning rate; None: twice the policy's.
        max_grad_norm: the gradient's norm is cut to it.
        updates: optimiser steps on each rollout batch, all its answers in each. 0: a trained model that is only asked.
        learns: ``before`` or ``after`` it scores the batch.
        outcome: label of an answer: ``reward``, or the name of a verifier for its score. In [0, 1].
        path: folder, or name on the hub, of a causal language model with the policy's vocabulary to begin with, such
            as one of :func:`apportion.prm.implicit.train_implicit`; None: the policy's start.
    """

    beta: float = 0.05
    lr: float | None = None
    max_grad_norm: float = 10.0
    updates: int = 1
    learns: Literal["before", "after"] = "after"
    outcome: str = "reward"
    path: str | None = None
    _model: Policy = field(init=False, repr=False)
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)
    _forwards: ForwardCounter = field(init=False, repr=False)
    _temperature: float = field(init=False, repr=False)
    _rows: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.learns not in ("before", "after"):
            raise InputError(f"the scorer's learns={self.learns!r}: must be before or after")
        for name in ("beta", "lr", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"the scorer's {name}={value}: must be over 0")
        if self.updates < 0:
            raise InputError(f"the scorer's updates={self.updates}: must be at least 0")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"ref_logprobs", "reward" if self.outcome == "reward" else f"score:{self.outcome}"})

    def begin(self, policy: Policy, *, rollout: RolloutConfig, optim: OptimConfig, forwards: ForwardCounter) -> None:
        model = copy.deepcopy(policy.model) if self.path is None else _load(self.path, policy)
        self._model = replace(policy, model=model.eval())
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=self.lr or 2 * optim.lr, weight_decay=0.0)
        self._forwards, self._temperature, self._rows = forwards, rollout.temperature, optim.micro_batch_rows

    def __call__(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> Tensor:  # noqa: ARG002
        chosen = trained_rows(batch)
        if not chosen:
            return torch.zeros(batch.completion_mask.shape)
        with self._forwards.counting(self._model.model):
            logprobs = score_in_parts(
                self._model,
                [rollouts[row].prompt_ids for row in chosen],
                [rollouts[row].completion_ids for row in chosen],
                temperature=self._temperature,
                rows=self._rows,
            ).logprobs
        ratios = logprobs - _reference(batch)[chosen, : logprobs.shape[1]]
        return scored_rows(batch, chosen, list(ratios))

    def observe(self, policy: Policy, rollouts: Sequence[Rollout], batch: CreditBatch) -> dict[str, float]:  # noqa: ARG002
        outcome = self._labels(batch)
        rows = (~outcome.isnan()).nonzero()[:, 0]
        if not len(rows) or not self.updates:
            return {}
        metrics: dict[str, float] = {"skipped_updates": 0.0}
        for number in range(self.updates):
            loss, sums = self._accumulate(rows, rollouts, batch, outcome)
            if number == 0:
                metrics["loss"] = loss
                metrics["accuracy"] = pairwise_accuracy(sums, outcome[rows], batch.group_ids[rows])
            metrics["grad_norm"] = self._step()
            metrics["skipped_updates"] += not math.isfinite(metrics["grad_norm"])
        return metrics

    def _labels(self, batch: CreditBatch) -> Tensor:
        """(B,) in [0, 1], NaN in rows that teach nothing."""
        outcome = batch.outcome(self.outcome)
        outside = ((outcome < 0) | (outcome > 1)).nonzero()
        if len(outside):
            row = int(outside[0])
            raise InputError(
                f"the implicit reward model's outcome={self.outcome}: row {row} has {float(outcome[row]):g}, and a "
                "label lies between 0 and 1; name a verifier that gives such a score, as in outcome=answer"
            )
        return outcome

    def _accumulate(
        self, rows: Tensor, rollouts: Sequence[Rollout], batch: CreditBatch, outcome: Tensor
    ) -> tuple[float, Tensor]:
        """Add the gradient of the mean loss of ``rows``; the loss, and each row's sum of q, (R,)."""
        total, sums = 0.0, torch.zeros(len(rows), dtype=torch.float64)
        lengths = torch.tensor([len(rollouts[int(row)].completion_ids) for row in rows])
        order = lengths.argsort(stable=True)  # rows of like length share a forward: less padding
        device, reference = self._model.device, _reference(batch)
        with self._forwards.counting(self._model.model):
            for part in order.split(self._rows):
                some = [rollouts[int(row)] for row in rows[part]]
                width = int(lengths[part].max())
                scored = score_completions(
                    self._model,
                    [rollout.prompt_ids for rollout in some],
                    [rollout.completion_ids for rollout in some],
                    width=width,
                    temperature=self._temperature,
                )
                mask = batch.completion_mask[rows[part], :width].to(device)
                ratios = scored.logprobs - reference[rows[part], :width].to(device)
                loss = outcome_loss(ratios, mask, outcome[rows[part]].to(device), beta=self.beta).sum() / len(rows)
                loss.backward()
                total += float(loss.detach())
                sums[part] = ratios.detach().where(mask, 0.0).sum(dim=1).double().cpu()
        return total, sums

    def _step(self) -> float:
        """One optimiser step; none where the gradient's norm, which is returned, is not finite."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self._model.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._model.model.load_state_dict(state["model"])
        except RuntimeError as error:  # how torch says that the names or shapes are others
            raise ValueError(f"the implicit reward model is another one: {one_line(error)}") from error
        self._optimizer.load_state_dict(state["optimizer"])


def _reference(batch: CreditBatch) -> Tensor:
    if batch.ref_logprobs is None:
        raise InputError("the scorer ImplicitPrm reads ref_logprobs, and the batch has none")
    return batch.ref_logprobs


def _load(path: str, policy: Policy) -> Any:
    """A causal language model of the policy's vocabulary, on its device and with float32 weights that learn."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be loaded as an implicit reward model ({one_line(error)})") from error
    if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(policy.tokenizer):
        raise InputError(f"{path}: has another vocabulary than the policy, whose ids the reward model has to read")
    return model.to(policy.device)
