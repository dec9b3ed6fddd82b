"""The common rollouts of a probe: freshly sampled, or those that a run saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...credit import CreditBatch, Rollout, collate
from ...grpo.collect import as_sample, check_panel, collect
from ...grpo.policy import Policy
from ...grpo.sampling import Generation, RolloutConfig
from ...grpo.seeds import named_seed
from ...grpo.task import Problem, Task
from ...verifiers import InputError
from ...verifiers.panel import Panel
from ..tables import read_rows

__all__ = ["Probed", "read_saved", "sample"]


@dataclass(frozen=True)
class Probed:
    """Rollouts of N problems, judged.

    Args:
        problems: N problems; ``rollouts[i].group_id`` is the index of its own.
        rollouts: B rollouts.
        batch: the same as tensors, (B, T).
    """

    problems: Sequence[Problem]
    rollouts: Sequence[Rollout]
    batch: CreditBatch


def sample(
    policy: Policy,
    task: Task,
    panel: Panel,
    config: RolloutConfig,
    *,
    problems: int | Sequence[Problem],
    seed: int,
    max_error_share: float,
    step: int = 1,
) -> Probed:
    """``config.group_size`` answers to each problem.

    Args:
        policy: to sample from.
        task: gives problems to train on, where ``problems`` is their number.
        panel: judges the answers.
        config: how they are sampled.
        problems: a number, or these.
        seed, step: name the random streams.
        max_error_share: see :func:`apportion.grpo.collect.check_panel`.
    """
    drawn = list(task.batch(1, problems, seed)) if isinstance(problems, int) else problems
    collected = collect(policy, drawn, panel, config, seed=seed, step=step)
    check_panel(collected.panel, max_error_share)
    probed = _probed(drawn, collected.rollouts, config, seed)
    return replace(probed, batch=replace(probed.batch, tree=collected.tree))


def read_saved(path: str, policy: Policy, panel: Panel, config: RolloutConfig, *, seed: int, limit: int) -> Probed:
    """Rollouts that a run wrote, judged again by the verifiers of this command.

    Args:
        path: a file of ``rollouts/`` of a run, or that folder: then its last file.
        policy: decodes; it ought to be the one that sampled them.
        limit: at most so many groups.
    """
    file = _file(path)
    problems, owners, generations = _groups(file, limit, policy.model.get_input_embeddings().num_embeddings)
    if not generations:
        raise InputError(f"probe.rollouts={path}: holds no rollout")
    samples = [
        as_sample(policy, problems[owner], prompt, generation, located=True)
        for (owner, prompt), generation in zip(owners, generations)
    ]
    judged = panel.judge(samples)
    rollouts = [
        Rollout(
            prompt_ids=prompt,
            completion_ids=generation.ids,
            logprobs=generation.logprobs,
            offsets=one.metadata["offsets"],
            text=one.completion,
            group_id=owner,
            truncated=generation.truncated,
            model_mask=generation.model_mask,
            verdicts=verdicts,
            reward=panel.reward(verdicts),
        )
        for (owner, prompt), generation, one, verdicts in zip(owners, generations, samples, judged.verdicts)
    ]
    return _probed(problems, rollouts, config, seed)


def _probed(problems: Sequence[Problem], rollouts: Sequence[Rollout], config: RolloutConfig, seed: int) -> Probed:
    if all(rollout.reward is None for rollout in rollouts):
        raise InputError("reward: no answer got a reward; do the problems have reference answers?")
    if not any(len(rollout.completion_ids) for rollout in rollouts):
        raise InputError("rollouts: no answer has a token; raise rollout.max_new_tokens, or look at the policy")
    batch = collate(rollouts, mask_truncated=config.truncated == "mask", seed=named_seed(seed, "credit", 1))
    return Probed(problems, rollouts, batch)


def _file(path: str) -> str:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return str(folder)
    inside = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    files = sorted(inside.glob("step_*.parquet"))
    if not files:
        raise InputError(
            f"probe.rollouts={path}: holds no rollouts; give a file such as RUN/rollouts/step_00010.parquet"
        )
    return str(files[-1])


def _groups(
    file: str, limit: int, vocabulary: int
) -> tuple[list[Problem], list[tuple[int, list[int]]], list[Generation]]:
    """Problems, each row's problem and prompt ids, and its generation, of the first ``limit`` groups."""
    problems: list[Problem] = []
    places: dict[tuple[int, int], int] = {}
    owners: list[tuple[int, list[int]]] = []
    generations: list[Generation] = []
    for number, row in read_rows(file, "probe.rollouts"):
        try:
            group = int(row.get("step") or 0), int(row["group_id"])
            if group not in places:
                if len(problems) == limit:
                    continue
                places[group] = len(problems)
                problems.append(Problem(f"{row['problem_id']}", row["prompt"], row["reference"]))
            if problems[places[group]].prompt != row["prompt"]:
                raise ValueError("another prompt than the other rows of its group")
            prompt = [int(one) for one in row["prompt_ids"]]
            generations.append(_generation(row, prompt, vocabulary))
            owners.append((places[group], prompt))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{file}, row {number}: is no rollout as a run writes it ({type(error).__name__}: {error}); give "
                "RUN/rollouts/step_N.parquet"
            ) from error
    return problems, owners, generations


def _generation(row: Mapping[str, Any], prompt: Sequence[int], vocabulary: int) -> Generation:
    ids, mask = [int(one) for one in row["completion_ids"]], [bool(one) for one in row["completion_mask"]]
    logprobs = np.asarray(row["logprobs"], dtype=float).tolist()
    if not prompt or not ids or not all(0 <= one < vocabulary for one in [*prompt, *ids]):
        raise ValueError(f"prompt_ids or completion_ids is empty, or an id is none of the policy's {vocabulary}")
    if not len(ids) == len(mask) == len(logprobs) or not all(-math.inf < one <= 1e-3 for one in logprobs):
        raise ValueError("completion_ids, completion_mask and logprobs differ in length, or a logprob is none")
    whole = all(mask) or not any(mask)  # a row that was left out of training is a row like any other here
    return Generation(ids, logprobs, bool(row["truncated"]), None if whole else mask)
