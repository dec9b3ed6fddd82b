"""A window comes back from a checkpoint with all its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from apportion.credit import Credit, Rollout, collate
from apportion.credit.batch import PrefixValues, TreeIndex
from apportion.grpo.window import Window
from apportion.verifiers import Span, Verdict


def plain(value: Any) -> Any:
    """Nested dataclasses and tensors as plain values, with their types."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.nan_to_num(-77).tolist())
    if is_dataclass(value):
        return (type(value).__name__, {field.name: plain(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def test_everything_that_a_later_step_reads_survives(rollout_of: Callable[..., Rollout], tmp_path: Path) -> None:
    verdicts = {"steps": Verdict(0.5, (Span(0, 2, 1.0), Span(2, 3, 0.0))), "answer": Verdict(None)}
    rollouts = [
        rollout_of([5, 6, 7], reward=1.0, verdicts=verdicts),
        rollout_of([8], prompt=[9], group=1, truncated=True, verdicts=verdicts),
    ]
    table, counts = torch.rand(2, 3), torch.ones(2, 3, dtype=torch.long)
    batch = replace(
        collate(rollouts, mask_truncated=True, seed=5),
        entropy=table,
        sum_pi_squared=table / 2,
        ref_logprobs=-table,
        token_scores={"implicit": table},
        prefix_values={"steps": PrefixValues(table, counts, table / 3)},
        tree=TreeIndex(counts, counts, counts + 1),
        progress=0.25,
    )
    window = Window.open(7, rollouts, batch)
    assert not window.credit.advantages.any()
    window.credit = Credit(table, loss_weight=table / 4)
    window.ref_logprobs = -table
    window.metrics, window.sums, window.done = {"reward/mean": 0.5}, {"tokens": 3.0}, 2
    torch.save(window.state(), tmp_path / "window.pt")
    back = Window.from_state(torch.load(tmp_path / "window.pt", weights_only=True))
    assert plain(back) == plain(window)
    assert (back.prompt_ids, back.completion_ids) == ([[4, 5], [9]], [[5, 6, 7], [8]])
