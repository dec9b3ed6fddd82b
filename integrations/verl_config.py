"""What a run of verl says about credit, in ``algorithm.credit``: the strategy, the verifiers and the reward."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .. import conf
from ..credit import CreditStrategy
from ..credit.strategy import missing_signals
from ..verifiers import InputError
from ..verifiers.panel import Panel, gives_spans

__all__ = ["ESTIMATOR", "VerlCredit", "build", "check_run", "plain", "read_credit"]

ESTIMATOR = "apportion"  # algorithm.adv_estimator, reward.reward_manager.name and the name of the plugin
CREDIT = "algorithm.credit"
_KEYS = ("strategy", "verifiers", "reward", "success", "mask_truncated", "timeout_s")
_CONF = Path(conf.__file__).parent
_INTERPOLATION = re.compile(r"\$\{oc\.(env|select):([^,}]+)(?:,([^}]*))?\}")
_ABSENT = {
    "token_scores": "verl has no scorers of tokens",
    "prefix_values": "verl does not sample from the states between steps",
    "tree": "verl does not sample trees",
    "sum_pi_squared": "the trainers of verl 0.9 do not hand it on",
    "logprobs": "verl assigns credit once for each batch, not at each optimiser step",
}


@dataclass(frozen=True)
class VerlCredit:
    """``algorithm.credit`` of a run, built.

    Args:
        strategy: assigns the credit.
        panel: the verifiers and what each counts in the reward; without verifiers the reward is verl's own.
        success: the verifier whose score is verl's ``acc``; None takes the reward.
        mask_truncated: give answers that the length limit cut no credit and no vote in their group.
    """

    strategy: CreditStrategy
    panel: Panel
    success: str | None = None
    mask_truncated: bool = False


def read_credit(algorithm: Mapping[str, Any]) -> VerlCredit:
    """Build what ``algorithm.credit`` describes; one line names the key at fault.

    A strategy or verifier is a name of ``conf/credit`` or ``conf/verifier``, the path of such a YAML file, or a dotted
    path. Options go beside it, as ``{use: localized/capo, penalty: 0.5}``.

    Args:
        algorithm: verl's node of that name.
    """
    node = plain(algorithm).get("credit")
    if not isinstance(node, dict) or "strategy" not in node:
        raise InputError(f"{CREDIT}.strategy: is missing; give for example +{CREDIT}.strategy=uniform")
    for key in node:
        if key not in _KEYS:
            raise InputError(f"{CREDIT}.{key}: nothing reads this key; there are: {', '.join(_KEYS)}")
    judges, weights = node.get("verifiers") or {}, node.get("reward") or {}
    for key, value in (("verifiers", judges), ("reward", weights)):
        if not isinstance(value, dict):
            raise InputError(f"{CREDIT}.{key}={value}: must be names with values, as +{CREDIT}.{key}.answer=...")
    verifiers = {name: build(value, "verifier", f"{CREDIT}.verifiers.{name}") for name, value in judges.items()}
    have = ", ".join(verifiers) or "none"
    named = [(f"reward.{name}", name) for name in weights]
    for key, name in [*named, ("success", node.get("success"))]:
        if name is not None and name not in verifiers:
            raise InputError(f"{CREDIT}.{key}: no verifier {name!r} (there are: {have}); add {CREDIT}.verifiers.{name}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise InputError(f"{CREDIT}.reward.{name}={weight}: must be a number")
    return VerlCredit(
        strategy=build(node["strategy"], "credit", f"{CREDIT}.strategy"),
        panel=Panel(verifiers, weights, node.get("timeout_s")),
        success=node.get("success"),
        mask_truncated=bool(node.get("mask_truncated", False)),
    )


def check_run(config: Mapping[str, Any]) -> VerlCredit:
    """The credit of a run, after refusing what the run cannot give; called before the first rollout.

    Args:
        config: the whole configuration of verl.
    """
    credit = read_credit(config["algorithm"])
    strategy, verifiers = credit.strategy, credit.panel.verifiers
    ours = _at(config, "reward.reward_manager.name") == ESTIMATOR
    if verifiers and not ours:
        raise InputError(
            f"reward.reward_manager.name: must be {ESTIMATOR} for {CREDIT}.verifiers to be asked "
            f"(reward.reward_manager.source=register)"
        )
    if ours and not credit.panel.reward_weights:
        raise InputError(f"{CREDIT}.reward: is empty; give a verifier and its weight, as +{CREDIT}.reward.answer=1")
    if _at(config, "reward.reward_model.enable"):
        raise InputError("reward.reward_model.enable=true: takes the reward from its model and asks no verifier")
    if _at(config, "actor_rollout_ref.actor.policy_loss.loss_mode") == "geo_mean":
        raise InputError(
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean: averages the credit over each answer; use vanilla"
        )
    if ours and _at(config, "actor_rollout_ref.rollout.agent.default_agent_loop") == "tool_agent":
        raise InputError(
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent: hides from verifiers what the tools wrote; "
            "use apportion_tool_agent"
        )
    if _at(config, "algorithm.use_kl_in_reward") and "reward" not in strategy.requires:
        raise InputError(
            f"algorithm.use_kl_in_reward=true: {type(strategy).__name__} does not read the reward, so the KL would be "
            "lost; use actor_rollout_ref.actor.use_kl_loss=true"
        )
    for signal in missing_signals(
        strategy, _signals(config, credit), {"logprobs"} if strategy.phase == "update" else ()
    ):
        raise InputError(f"{CREDIT}.strategy: {type(strategy).__name__} needs {_remedy(signal, credit)}")
    return credit


def build(node: Any, group: str, key: str) -> Any:
    """The object of a name, a YAML file, a dotted path, or one of these under ``use`` with options beside it.

    Args:
        node: plain values.
        group: folder of ``conf`` that the names are in.
        key: where the node stands, for messages.
    """
    described = {"use": node} if isinstance(node, str) else node
    if not isinstance(described, dict) or not {"use", "_target_"} & described.keys():
        raise InputError(f"{key}: give a name of conf/{group}, a dotted path, or either under {key}.use")
    return _built(described, group, key)


def plain(node: Any) -> Any:
    """Dicts, lists and values of a configuration node, whatever its classes."""
    if isinstance(node, Mapping):
        return {str(name): plain(node[name]) for name in node}
    return [plain(value) for value in node] if isinstance(node, Sequence) and not isinstance(node, str) else node


def _built(node: Any, group: str, key: str) -> Any:
    if isinstance(node, list):
        return [_built(value, group, f"{key}.{place}") for place, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "use" in node:
        node = _merged(_named(node["use"], group, key), {name: node[name] for name in node if name != "use"})
    for name, value in node.items():
        if value == "???":
            raise InputError(f"{key}.{name}: needs a value; give {key}.{name}=...")
    options = {name: _built(value, group, f"{key}.{name}") for name, value in node.items() if name != "_target_"}
    return _made(node["_target_"], options, key) if "_target_" in node else options


def _named(name: Any, group: str, key: str) -> dict[str, Any]:
    ours = _CONF / group / f"{name}.yaml"
    path = Path(name) if name.endswith(".yaml") else ours
    if path.is_file():
        return _read(path)
    if re.fullmatch(r"\w+(\.\w+)+", name) and not name.endswith(".yaml"):
        return {"_target_": name}
    raise InputError(f"{key}={name}: no such file in conf/{group}, nor a dotted path such as my_file.MyClass")


def _read(path: Path) -> dict[str, Any]:
    """A file of ``conf``, after the files that its list of defaults puts under keys of its own."""
    own = yaml.safe_load(_INTERPOLATION.sub(_interpolated, path.read_text(encoding="utf-8")))
    found: dict[str, Any] = {}
    for entry in own.pop("defaults", []):
        for where, name in entry.items() if isinstance(entry, dict) else ():
            group, _, place = where.strip("/").partition("@")
            inner = _read(_CONF / group / f"{name}.yaml")
            found = _merged(found, functools.reduce(lambda node, part: {part: node}, reversed(place.split(".")), inner))
    return _merged(found, own)


def _interpolated(match: re.Match[str]) -> str:
    kind, name, default = match.groups()
    return (os.environ.get(name) if kind == "env" else None) or default or "null"


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the upper one's values first; an object that it names replaces the lower one whole."""
    both = dict(below)
    for name, value in above.items():
        old = both.get(name)
        if isinstance(old, dict) and isinstance(value, dict) and not {"use", "_target_"} & value.keys():
            value = _merged(old, value)
        both[name] = value
    return both


def _made(path: str, options: dict[str, Any], key: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
        return target(**options)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    except Exception as error:  # the module is a program, and so is the class
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{key}: {path} cannot be made ({reason})") from error


def _at(run: Mapping[str, Any], key: str) -> Any:
    found: Any = run
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _signals(run: Mapping[str, Any], credit: VerlCredit) -> set[str]:
    """Signals that the run gives, see :class:`apportion.credit.CreditStrategy`."""
    available = {"reward", "old_logprobs", "completion_ids"}
    for name, verifier in credit.panel.verifiers.items():
        available |= {f"score:{name}", *([f"spans:{name}"] if gives_spans(verifier) else [])}
    if _at(run, "actor_rollout_ref.actor.use_kl_loss") or _at(run, "algorithm.use_kl_in_reward"):
        available.add("ref_logprobs")
    if not _at(run, "algorithm.rollout_correction.bypass_mode"):
        available.add("entropy")
    return available


def _remedy(signal: str, credit: VerlCredit) -> str:
    kind, _, name = signal.partition(":")
    if kind == "spans" and name in credit.panel.verifiers:
        return f"spans of {CREDIT}.verifiers.{name}, which gives scores only; use one that locates faults"
    if kind in ("score", "spans"):
        have = ", ".join(credit.panel.verifiers) or "none"
        return f"the {kind} of a verifier {name!r} (there are: {have}); add +{CREDIT}.verifiers.{name}=..."
    if kind == "ref_logprobs":
        return "ref_logprobs; set actor_rollout_ref.actor.use_kl_loss=true (its kl_loss_coef may be 0)"
    if kind == "entropy":
        return "entropy, which algorithm.rollout_correction.bypass_mode=true leaves out; set it to false"
    return f"{signal}: {_ABSENT.get(kind, 'verl does not have it')}; use apportion train"
