"""Ways to train a process reward model, one object of ``conf/prm`` each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..prm.data import split_by_problem
from ..prm.metrics import Predictions
from ..prm.reliability import RIGHT
from ..prm.steps import StepExample
from ..verifiers import InputError

if TYPE_CHECKING:  # they load torch
    from ..grpo.policy import Policy
    from ..prm.features import FrozenBackbone
    from ..prm.implicit import ImplicitOptions
    from ..prm.model import StepModel
    from ..prm.training import PrmTrainingConfig

__all__ = ["Fitting", "ProbedSteps", "Recipe", "TrainedOutcomes", "TrainedSteps", "predict_steps"]

Scorer = Callable[[Sequence[StepExample]], Predictions]


@dataclass(frozen=True)
class Fitting:
    """What a recipe gets besides its examples.

    Args:
        policy: builds the policy, where a recipe starts from it.
        segmenter: that cut the steps, or None where nobody knows.
        folder: of the run.
        device: torch device.
        progress: told the figures of a fit, see :data:`apportion.prm.fitting.Progress`.
        stop: asked now and then; True ends the training at a checkpoint.
    """

    policy: Callable[[], Policy]
    segmenter: Any
    folder: Path
    device: str
    progress: Callable[[Mapping[str, float]], None] | None = None
    stop: Callable[[], bool] | None = None


class Recipe(Protocol):
    """Trains on labelled solutions, leaves a model in ``fitting.folder / "model"``, and gives what scores steps.

    None instead of a scorer means that it was stopped.
    """

    def __call__(
        self, train: Sequence[StepExample], held_out: Sequence[StepExample], fitting: Fitting
    ) -> Scorer | None: ...


@dataclass(frozen=True)
class TrainedSteps:
    """A causal language model trained to say of each step whether it is right.

    Args:
        training: how, see :class:`apportion.prm.training.PrmTrainingConfig`.
        backbone: folder or hub name of the model to start from; None: the policy, as it starts the training of GRPO.
        labels: of the head, 2 or 1.
        dtype: of the weights; None: as stored.
        settings: how the model reads steps, see :class:`apportion.prm.settings.StepSettings`.
        calibration: fit ``isotonic`` or ``platt`` calibration on a part of the training problems, which the training
            then does not see; None: none.
        calibration_share: of the problems.
        seed: of the head and of that split.
    """

    training: PrmTrainingConfig
    backbone: str | None = None
    labels: int = 2
    dtype: str | None = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)
    calibration: Literal["isotonic", "platt"] | None = None
    calibration_share: float = 0.1
    seed: int = 0

    def __call__(
        self, train: Sequence[StepExample], held_out: Sequence[StepExample], fitting: Fitting
    ) -> Scorer | None:
        from ..prm.training import train_prm

        if train is held_out:
            raise InputError("held_out=0: a trained model cannot be measured on what it was trained on; give a share")
        model = self._start(fitting).to(fitting.device)
        kept_back: Sequence[StepExample] = ()
        if self.calibration is not None:
            train, kept_back = split_by_problem(train, self.calibration_share, self.seed)
            if len({label >= RIGHT for example in kept_back for label in example.labels if label is not None}) < 2:
                raise InputError(
                    f"prm.calibration_share={self.calibration_share}: the {len(kept_back)} solutions kept back for the "
                    "calibration have no wrong step, or no right one; raise it"
                )
        training = replace(self.training, cpu=fitting.device == "cpu")
        done = train_prm(
            model, train, held_out, training, fitting.folder, fitting.progress, resume=True, stop=fitting.stop
        )
        if not done.finished:
            return None
        if self.calibration is not None:
            self._calibrate(model, kept_back, fitting.folder / "model")
        return lambda examples: predict_steps(model, examples)

    def _start(self, fitting: Fitting) -> StepModel:
        from ..prm.model import StepModel

        known = {"segmenter": fitting.segmenter, **self.settings} if fitting.segmenter is not None else self.settings
        options: dict[str, Any] = {"labels": self.labels, "seed": self.seed, "settings": known}
        if self.backbone is not None:
            return StepModel.from_backbone(self.backbone, dtype=self.dtype, **options)
        policy = fitting.policy()
        return StepModel.from_backbone(policy.model, tokenizer=policy.tokenizer, **options)

    def _calibrate(self, model: StepModel, examples: Sequence[StepExample], path: Path) -> None:
        from ..prm.calibration import fit_calibration
        from ..prm.loading import quiet_files

        pairs = [
            (chance, label)
            for example, row in zip(examples, predict_steps(model, examples))
            for label, chance in zip(example.labels, row)
            if label is not None and chance is not None
        ]
        if not pairs:
            raise InputError("prm.calibration: the problems kept back for it have no labelled step; raise its share")
        assert self.calibration is not None
        fitted = fit_calibration([chance for chance, _ in pairs], [label for _, label in pairs], self.calibration)
        model.settings = model.settings.changed({"calibration": fitted})
        with quiet_files():
            model.save_pretrained(path)


@dataclass(frozen=True)
class ProbedSteps:
    """Logistic regression on the hidden states of a frozen model: seconds instead of minutes.

    Where all solutions are trained on and measured (``held_out=0``), predictions come from folds grouped by problem.

    Args:
        backbone: what is read; None: the policy, which is saved in ``backbone/`` of the run.
        position: look at the step's place as well; it knows how long the whole solution is.
        strengths, folds: values of C that inner folds choose from, with the layer; number of outer and inner folds.
        labelled_only: read no step after a solution's last labelled one.
        cache: folder for the features, or None.
        batch_tokens: in one forward, padding included.
    """

    backbone: FrozenBackbone | None = None
    position: bool = False
    strengths: Sequence[float] = (0.01, 0.1, 1.0, 10.0, 100.0)
    folds: int = 5
    labelled_only: bool = False
    cache: str | None = None
    batch_tokens: int = 4096

    def __call__(
        self, train: Sequence[StepExample], held_out: Sequence[StepExample], fitting: Fitting
    ) -> Scorer | None:
        from ..prm.features import FrozenBackbone
        from ..prm.loading import quiet_files
        from ..prm.probe import train_probe

        backbone = self.backbone
        if backbone is None:
            policy, place = fitting.policy(), fitting.folder / "backbone"  # the probe is of no use without it
            with quiet_files():
                policy.model.save_pretrained(place)
                policy.tokenizer.save_pretrained(place)
            backbone = FrozenBackbone.load(place, device=fitting.device)
        done = train_probe(
            train,
            backbone,
            fitting.folder / "model",
            position=self.position,
            strengths=self.strengths,
            folds=self.folds,
            cross_validate=train is held_out,
            labelled_only=self.labelled_only,
            cache=self.cache,
            batch_tokens=self.batch_tokens,
            segmenter=fitting.segmenter,
        )
        judged = done.out_of_fold
        if judged is not None:
            return lambda _: judged.predictions
        return lambda examples: done.saved.predict(backbone, examples)


@dataclass(frozen=True)
class TrainedOutcomes:
    """An implicit reward model, learned from outcomes of whole answers alone; the online scorer can begin with it.

    Args:
        options: how, see :class:`apportion.prm.implicit.ImplicitOptions`.
        backbone: folder or hub name of a causal language model, which is the reference too; None: the policy.
    """

    options: ImplicitOptions
    backbone: str | None = None

    def __call__(
        self, train: Sequence[StepExample], held_out: Sequence[StepExample], fitting: Fitting
    ) -> Scorer | None:
        import copy

        from ..prm.implicit import encode_outcomes, implicit_rewards, train_implicit
        from ..prm.loading import quiet_files

        if train is held_out:
            raise InputError("held_out=0: a trained model cannot be measured on what it was trained on; give a share")
        model, tokenizer, encode = self._start(fitting)
        reference = copy.deepcopy(model).eval().requires_grad_(False)
        rows = encode_outcomes(train, tokenizer, encode=encode)
        train_implicit(model.train(), reference, rows, self.options)
        with quiet_files():
            for part in (model.eval(), tokenizer):
                part.save_pretrained(fitting.folder / "model")

        def score(examples: Sequence[StepExample]) -> Predictions:
            found = encode_outcomes(examples, tokenizer, encode=encode)
            rewards = implicit_rewards(model, reference, found, beta=self.options.beta)
            return [[float(own.double().sum().sigmoid())] for own in rewards]

        return score

    def _start(self, fitting: Fitting) -> tuple[Any, Any, Callable[[str], Sequence[int]] | None]:
        if self.backbone is None:
            policy = fitting.policy()
            return policy.model, policy.tokenizer, policy.encode
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ..prm.loading import load_model, reading, source_of

        model, _ = load_model(self.backbone, AutoModelForCausalLM, "float32")
        with reading(self.backbone):
            return model.to(fitting.device), AutoTokenizer.from_pretrained(source_of(self.backbone)), None


def predict_steps(model: StepModel, examples: Sequence[StepExample], *, batch_tokens: int = 16_384) -> Predictions:
    """For each example the probability of "right" of each step; None for steps that do not fit.

    Calibrated where the model has a calibration.
    """
    from ..prm.score import step_probabilities

    rows = [model.encode(e.prompt, e.completion, e.steps, e.metadata) for e in examples]
    scored = step_probabilities(model, rows, batch_tokens=batch_tokens, calibrated=True)
    return [[*row, *[None] * (len(e.steps) - len(row))] for e, row in zip(examples, scored)]
