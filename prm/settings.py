"""What a reward model's folder says beyond its weights: the file ``prm.json``, plain values only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..verifiers import InputError, segmenters
from ..verifiers.segmenters import Segmenter
from .calibration import Calibration, calibration_from_json, calibration_to_json
from .encoding import Template

__all__ = ["FILE", "QWEN", "TRL", "StepSettings", "segmenter_of", "segmenter_record"]

FILE = "prm.json"
Style = Literal["head", "tokens"]


@dataclass(frozen=True)
class StepSettings:
    """How to read a reward model.

    Args:
        style: ``head``, a token classifier with two labels, of which 1 is right, or with one; ``tokens``, a language
            model that says one of two tokens.
        tokens: right, wrong: two texts of one token each, or two ids.
        template: what the model reads.
        segmenter: how its steps were cut, as a record (see :func:`segmenter_record`); None where nobody knows.
        max_length: most tokens it was trained on; None: as many as it has positions for.
        calibration: of its probabilities.
    """

    style: Style = "head"
    tokens: tuple[str | int, str | int] = ("+", "-")
    template: Template = field(default_factory=Template)
    segmenter: Mapping[str, Any] | None = None
    max_length: int | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise InputError(f"style={self.style}: give one of {', '.join(get_args(Style))}")
        named = self.tokens
        if isinstance(named, str) or len(named) != 2 or not all(isinstance(t, str | int) for t in named):
            raise InputError(f"tokens={named}: give two, the one for right and the one for wrong")
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length={self.max_length}: give a number of tokens from 1 on, or null for no limit")

    def changed(self, changes: Mapping[str, Any]) -> StepSettings:
        """With some values replaced, given as in ``prm.json`` or as objects; a template may be given in part.

        >>> StepSettings().changed({"style": "tokens", "template": {"step_tag": " ки"}}).template.step_tag
        ' ки'
        """
        _check_names(changes, StepSettings, "")
        values = dict(changes)
        template, calibration = values.get("template"), values.get("calibration")
        if isinstance(template, Mapping):
            _check_names(template, Template, "template.")
            values["template"] = replace(self.template, **template)
        if isinstance(calibration, Mapping):
            values["calibration"] = calibration_from_json(calibration)
        if isinstance(values.get("tokens"), list):
            values["tokens"] = tuple(values["tokens"])
        if values.get("segmenter") is not None:
            values["segmenter"] = segmenter_record(values["segmenter"])
        return replace(self, **values)

    def to_json(self) -> str:
        """The text of ``prm.json``."""
        values = {name: getattr(self, name) for name in _names(StepSettings)}
        values["template"] = asdict(self.template)
        if self.calibration is not None:
            values["calibration"] = calibration_to_json(self.calibration)
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> StepSettings:
        """What ``prm.json`` holds; it is data, and nothing it names is imported."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path}: is no JSON ({error})") from error
        if not isinstance(values, dict):
            raise InputError(f"{path}: holds no object with settings")
        try:
            return cls().changed(values)
        except (InputError, TypeError) as error:
            raise InputError(f"{path}: {error}") from error


def segmenter_record(segmenter: Segmenter | Mapping[str, Any]) -> dict[str, Any]:
    """The dotted path and the options of a segmenter, as plain values.

    >>> segmenter_record(segmenters.NumberedSteps(mode="list"))
    {'_target_': 'apportion.verifiers.segmenters.NumberedSteps', 'mode': 'list'}
    """
    if isinstance(segmenter, Mapping):
        if not isinstance(segmenter.get("_target_"), str):
            raise InputError(f"segmenter={dict(segmenter)}: names no _target_")
        return dict(segmenter)
    named: Any = segmenter if hasattr(segmenter, "__qualname__") else type(segmenter)
    options: dict[str, Any] = asdict(segmenter) if is_dataclass(segmenter) and not isinstance(segmenter, type) else {}
    return {"_target_": f"{named.__module__}.{named.__qualname__}", **options}


def segmenter_of(record: Mapping[str, Any] | None) -> Segmenter:
    """The segmenter of a record; only those of this package, since a model's folder must not choose what is run."""
    if record is None:
        raise InputError("segmenter: the model does not say how its steps were cut; give segmenter._target_=...")
    target = str(record["_target_"])
    module, _, name = target.rpartition(".")
    if module != segmenters.__name__ or name not in _SEGMENTERS:
        raise InputError(f"segmenter: the model's steps were cut by {target}; give segmenter._target_={target}")
    options = {key: _frozen(value) for key, value in record.items() if key != "_target_"}
    try:
        found: Segmenter = getattr(segmenters, name)(**options)
    except TypeError as error:
        raise InputError(f"segmenter: {target} cannot be made ({error})") from error
    return found


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _check_names(given: Mapping[str, Any], of: type[StepSettings] | type[Template], prefix: str) -> None:
    known = _names(of)
    for name in given:
        if name not in known:
            raise InputError(f"{prefix}{name}: is no setting; there are {', '.join(known)}")


def _names(of: type[StepSettings] | type[Template]) -> list[str]:
    return [each.name for each in fields(of)]


_SEGMENTERS = ("BlankLines", "Lines", "NumberedSteps", "Sentences")

# Checkpoints without a prm.json. TRL's PRM trainer: every step alone, scored at the separator after it.
TRL = StepSettings(
    template=Template(separator="", step_tag="\n", pieces=True), segmenter=segmenter_record(segmenters.Lines())
)
QWEN = StepSettings(
    template=Template(prompt="chat", separator="", step_tag="<extra_0>", pieces=True),
    segmenter=segmenter_record(segmenters.BlankLines()),
)
