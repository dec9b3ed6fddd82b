"""Laws of the probe: fitted and judged on different problems, saved without loss, the same as a verifier."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import apportion.conf
from apportion.experiments.prm_recipes import ProbedSteps
from apportion.prm.encoding import Template
from apportion.prm.features import FeatureSettings, FrozenBackbone, StepFeatures
from apportion.prm.linear_probe import fit_probe, grouped_folds, out_of_fold, step_columns
from apportion.prm.metrics import flatten_steps, step_measures
from apportion.prm.probe import SavedProbe, StepProbe, train_probe
from apportion.prm.settings import segmenter_of
from apportion.prm.steps import StepExample
from apportion.verifiers import InputError, Sample
from apportion.verifiers.panel import judge
from apportion.verifiers.segmenters import Lines

PLACES = 9


def solutions(problems: int, steps: int, seed: int = 0, share_wrong: float = 0.3) -> list[StepExample]:
    """Two solutions a problem, steps of one letter, labels at random."""
    generator = np.random.default_rng(seed)
    spans = tuple((2 * k, 2 * k + 1) for k in range(steps))
    return [
        StepExample(
            "?", "a " * steps, spans, tuple((generator.random(steps) > share_wrong).astype(float)), f"p{n // 2}"
        )
        for n in range(2 * problems)
    ]


def made(examples: list[StepExample], signal: float, seed: int = 1, layers: int = 2, width: int = 6) -> StepFeatures:
    """Noise, and in the last layer's first column the label times ``signal``."""
    labels = step_columns(examples)[0]
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(len(labels), layers, width)).astype(np.float32)
    states[:, -1, 0] += signal * np.nan_to_num(labels)
    return StepFeatures(states, generator.normal(size=(len(labels), PLACES)), tuple(range(layers)))


def auc(examples: list[StepExample], predictions: Any) -> float:
    return step_measures(flatten_steps(examples, predictions))["roc_auc"].value


def test_a_separable_toy_is_told_apart_whole() -> None:
    examples = solutions(20, 5)
    result = out_of_fold(examples, made(examples, 50.0), strengths=[0.1, 1.0])
    assert auc(examples, result.predictions) == 1.0
    assert [probe.layer for probe in result.probes] == [1] * 5


@pytest.mark.parametrize("position", [False, True])
def test_shuffled_labels_leave_nothing_to_learn(position: bool) -> None:
    # Shuffled within each solution: were some folds' shares of wrong steps higher, their probes' intercepts, fitted on
    # the others, would be lower there, and the pooled AUC below .5.
    areas = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        examples = [
            StepExample(
                "?", one.completion, one.steps, tuple(generator.permutation([0.0] * 2 + [1.0] * 4)), one.problem_id
            )
            for one in solutions(40, 6)
        ]
        result = out_of_fold(examples, made(examples, 0.0, seed, layers=1), position=position, strengths=[1.0])
        areas.append(auc(examples, result.predictions))
    low, high = stats.t.interval(0.95, 11, np.mean(areas), stats.sem(areas))
    assert low < 0.5 < high
    assert high - low < 0.08


def test_features_that_name_the_problem_teach_nothing_about_it() -> None:
    # Each problem has one label, and a column of its own that says it: a split within problems would be perfect.
    generator = np.random.default_rng(0)
    spans = ((0, 1), (2, 3))
    examples = [StepExample("?", "a b", spans, (float(n // 2 % 2),) * 2, f"p{n // 2}") for n in range(80)]
    examples = [examples[n] for n in generator.permutation(80)]
    states = np.zeros((160, 1, 40), np.float32)
    states[np.arange(160), 0, [int(one.problem_id[1:]) for one in examples for _ in spans]] = 1
    result = out_of_fold(examples, StepFeatures(states, np.zeros((160, PLACES)), (0,)), strengths=[1.0])
    assert auc(examples, result.predictions) < 0.55


def test_folds_share_no_problem_and_cover_all() -> None:
    groups = [f"p{n % 7}" for n in range(30)]
    seen: list[int] = []
    for train, test in grouped_folds(groups, 5):
        assert not {groups[n] for n in train} & {groups[n] for n in test}
        assert sorted([*train, *test]) == list(range(30))
        seen += test.tolist()
    assert sorted(seen) == list(range(30))


def test_there_are_no_more_folds_than_problems() -> None:
    assert len(list(grouped_folds(["a", "b", "a"], 5))) == 2
    with pytest.raises(InputError, match="needs two problems"):
        list(grouped_folds(["a", "a"], 5))


def test_a_held_out_problem_has_no_say_in_its_own_predictions() -> None:
    examples = solutions(10, 4)
    features = made(examples, 1.0)
    before = out_of_fold(examples, features, folds=3, strengths=[0.1, 1.0]).predictions
    (_, test), *_ = grouped_folds([one.problem_id for one in examples], 3)
    changed = list(examples)
    for n in test:
        one = examples[n]
        flipped = tuple(1 - label for label in one.labels if label is not None)
        changed[n] = StepExample(one.prompt, one.completion, one.steps, flipped, one.problem_id)
    after = out_of_fold(changed, features, folds=3, strengths=[0.1, 1.0]).predictions
    assert [after[n] for n in test] == [before[n] for n in test]
    assert after != before


def test_one_layer_and_strength_give_scikit_learns_own_fit() -> None:
    examples = solutions(15, 4)
    features = made(examples, 1.0, layers=1)
    labels, problems, _ = step_columns(examples)
    probe = fit_probe(features, labels, problems, strengths=[3.0])
    scaler = StandardScaler().fit(features.states[:, 0])
    columns = scaler.transform(features.states[:, 0]) / 6**0.5
    own = LogisticRegression(C=3.0, tol=1e-8, max_iter=1000).fit(columns, labels > 0.5)
    np.testing.assert_allclose(probe(features), own.predict_proba(columns)[:, 1], atol=1e-4)


def test_layer_and_strength_are_chosen_on_problems_that_the_inner_fits_have_not_seen() -> None:
    # In sample the weakest penalty on the widest noise would always look best.
    examples = solutions(20, 5)
    features = made(examples, 2.0, width=80)
    labels, problems, _ = step_columns(examples)
    noise = fit_probe(made(examples, 0.0, width=80), labels, problems, strengths=[100.0, 0.01])
    assert noise.strength == 0.01
    assert fit_probe(features._replace(layers=(4, 7)), labels, problems, strengths=[100.0, 1.0]).layer == 7


def test_places_and_states_are_two_blocks_of_equal_weight() -> None:
    examples = solutions(15, 4)
    features = made(examples, 1.0, layers=1)
    labels, problems, _ = step_columns(examples)
    probe = fit_probe(features, labels, problems, strengths=[3.0], position=True)
    blocks = [StandardScaler().fit_transform(b) / b.shape[1] ** 0.5 for b in (features.states[:, 0], features.places)]
    columns = np.concatenate(blocks, axis=1)
    own = LogisticRegression(C=3.0, tol=1e-8, max_iter=1000).fit(columns, labels > 0.5)
    np.testing.assert_allclose(probe(features), own.predict_proba(columns)[:, 1], atol=1e-4)


def test_a_soft_label_is_that_share_of_right_and_of_wrong_steps() -> None:
    spans = tuple((k, k + 1) for k in range(4))
    soft = [StepExample("?", "abcd", spans, (0.75, 0.25, 1.0, 0.0), f"p{n}") for n in range(2)]
    features = made(soft, 0.0, layers=1)
    rows = np.repeat(np.arange(8), 4)
    hard = np.tile([1.0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0], 2)
    labels, problems, _ = step_columns(soft)
    one = fit_probe(features, labels, problems, strengths=[4.0])
    other = fit_probe(features.where(rows), hard, problems[rows], strengths=[1.0])
    np.testing.assert_allclose(one(features), other(features), atol=1e-3)


def test_unknown_labels_and_unread_steps_are_left_out_of_the_fit() -> None:
    examples = solutions(10, 4)
    features = made(examples, 2.0)
    labels, problems, _ = step_columns(examples)
    left_out = np.arange(len(labels)) % 7
    some = labels.copy()
    some[left_out == 0] = np.nan
    states = features.states.copy()
    states[left_out == 1] = np.nan
    kept = left_out > 1
    probe = fit_probe(features._replace(states=states), some, problems)
    alone = fit_probe(features.where(kept), labels[kept], problems[kept])
    assert np.array_equal(probe.weights, alone.weights)
    chances = probe(features._replace(states=states))
    assert np.array_equal(np.isnan(chances), left_out == 1)


def test_labels_of_one_class_give_a_constant() -> None:
    examples = solutions(4, 3, share_wrong=0.0)
    result = out_of_fold(examples, made(examples, 0.0), position=True)
    assert {round(p, 6) for row in result.predictions for p in row if p is not None} == {1.0}


def test_no_labelled_step_is_told() -> None:
    examples = solutions(4, 3)
    features = made(examples, 0.0)
    with pytest.raises(InputError, match="no labelled step that the model has read"):
        fit_probe(features, np.full(24, np.nan), np.zeros(24, int))


def test_a_constant_column_does_no_harm() -> None:
    examples = solutions(20, 5)
    features = made(examples, 50.0)
    features.states[:, :, 3] = 1234.567
    assert auc(examples, out_of_fold(examples, features, strengths=[1.0]).predictions) > 0.999


TEXTS = ["12 + 7 = 19\nAnswer: 19", "12 + 7 = 57\nok", "The cat sat.", "19 * 3 = 57\n57 - 7 = 12\nAnswer: 12"]


def labelled() -> list[StepExample]:
    steps = [tuple(Lines()(text)) for text in TEXTS]
    return [
        StepExample("12?", text, own, tuple(float((n + k) % 2) for k in range(len(own))), f"p{n}")
        for n, (text, own) in enumerate(zip(TEXTS, steps))
    ]


@pytest.fixture(scope="module")
def trained(tokenizers: Any, backbones: Any, tmp_path_factory: Any) -> tuple[Path, FrozenBackbone, Any]:
    folder = tmp_path_factory.mktemp("probe")
    tokenizer = tokenizers()
    backbones("llama", tokenizer).save_pretrained(folder / "backbone")
    tokenizer.save_pretrained(folder / "backbone")
    backbone = FrozenBackbone.load(folder / "backbone", FeatureSettings(layers=(1, 2)), device="cpu")
    result = train_probe(labelled(), backbone, folder / "probe", position=True, segmenter=Lines())
    return folder / "probe", backbone, result


def test_a_saved_probe_is_the_fitted_one(trained: Any) -> None:
    path, backbone, result = trained
    features = backbone.features(labelled())
    assert np.array_equal(SavedProbe.load(path).probe(features), result.saved.probe(features))
    assert sorted(file.name for file in path.iterdir()) == ["probe.json", "probe.npz"]
    record = json.loads((path / "probe.json").read_text())
    assert segmenter_of(record["segmenter"]) == Lines()
    assert record["backbone"] == backbone.source


def test_predictions_are_those_of_the_saved_probe_and_folds_those_of_the_probe_alone(trained: Any) -> None:
    path, backbone, result = trained
    examples = labelled()
    saved = SavedProbe.load(path)
    assert [p for row in saved.predict(backbone, examples) for p in row] == saved.probe(
        backbone.features(examples)
    ).tolist()
    own = out_of_fold(examples, backbone.features(examples), position=True).predictions
    assert result.out_of_fold.predictions == own
    assert train_probe(examples, backbone, path.parent / "other", cross_validate=False).out_of_fold is None


def test_the_verifier_gives_the_probes_probabilities_as_spans(trained: Any) -> None:
    path, backbone, result = trained
    chances = result.saved.probe(backbone.features(labelled())).tolist()
    probe = StepProbe(str(path), aggregate="mean")
    for verifier in (probe, pickle.loads(pickle.dumps(probe))):
        verdicts = verifier([Sample("12?", text) for text in TEXTS])
        assert [(s.start, s.stop) for v in verdicts for s in v.spans] == [s for one in labelled() for s in one.steps]
        np.testing.assert_allclose([s.score for v in verdicts for s in v.spans], chances, atol=1e-6)
        np.testing.assert_allclose([v.score for v in verdicts], [np.mean([s.score for s in v.spans]) for v in verdicts])


def test_an_answer_without_steps_has_no_score(trained: Any) -> None:
    empty, junk = StepProbe(str(trained[0]))([Sample("12?", " \n"), Sample("", "\ud800\n\x00")])
    assert (empty.score, empty.spans) == (None, ())
    assert len(junk.spans) == 2


def test_an_answer_with_an_unread_step_keeps_the_spans_of_the_others(trained: Any, tmp_path: Path) -> None:
    saved = trained[2].saved
    short = SavedProbe(
        saved.probe,
        FeatureSettings(layers=saved.settings.layers, max_length=30),
        saved.backbone,
        saved.dtype,
        saved.digest,
        saved.segmenter,
    )
    short.save(tmp_path)
    (verdict,) = StepProbe(str(tmp_path))([Sample("12?", "12 + 7\n" + "19 * 3\n" * 20)])
    assert verdict.score is None
    assert 1 <= len(verdict.spans) < 21


def test_it_is_a_verifier_of_the_panel_and_the_batch_changes_nothing(trained: Any) -> None:
    samples = [Sample("12?", text) for text in [*TEXTS, "", "x" * 3000]]
    probe = StepProbe(str(trained[0]))
    result = judge({"it": probe}, samples)
    assert (result.errors, result.first_error) == ({"it": 0}, {})
    for verdicts, sample in zip(result.verdicts, samples):
        (alone,) = probe([sample])
        np.testing.assert_allclose(
            [span.score for span in verdicts["it"].spans], [span.score for span in alone.spans], atol=1e-5
        )


def test_other_weights_are_refused(trained: Any, tokenizers: Any, backbones: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    backbones("llama", tokenizer, 7).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has other weights than the probe was fitted on"):
        StepProbe(str(trained[0]), backbone=str(tmp_path))([Sample("12?", TEXTS[0])])


def test_a_backbone_in_memory_has_to_be_given_again(tokenizers: Any, backbones: Any, tmp_path: Path) -> None:
    tokenizer = tokenizers()
    backbone = FrozenBackbone(backbones("llama", tokenizer), tokenizer)
    train_probe(labelled(), backbone, tmp_path, segmenter=Lines())
    with pytest.raises(InputError, match="give backbone=FOLDER"):
        StepProbe(str(tmp_path))([Sample("12?", TEXTS[0])])


def test_without_a_segmenter_one_must_be_given(trained: Any, tmp_path: Path) -> None:
    train_probe(labelled(), trained[1], tmp_path)
    with pytest.raises(InputError, match="segmenter"):
        StepProbe(str(tmp_path))([Sample("12?", TEXTS[0])])
    assert StepProbe(str(tmp_path), segmenter=Lines())([Sample("12?", TEXTS[0])])[0].score is not None


@pytest.mark.parametrize("broken", ["nothing", "json", "npz", "pickle"])
def test_a_folder_without_a_whole_probe_is_told(broken: str, trained: Any, tmp_path: Path) -> None:
    if broken != "nothing":
        trained[2].saved.save(tmp_path)
    if broken == "json":
        (tmp_path / "probe.json").write_text("{}")
    if broken == "npz":
        (tmp_path / "probe.npz").write_bytes(b"no")
    if broken == "pickle":
        np.savez(tmp_path / "probe.npz", weights=np.array([{}], dtype=object), place_weights=np.zeros(0))
    with pytest.raises(InputError, match="holds no probe"):
        StepProbe(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"aggregate": "max"}, "aggregate=max: give one of min, prod, mean, last"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
    ],
)
def test_wrong_options_are_told(options: Any, told: str, trained: Any) -> None:
    with pytest.raises(InputError, match=told):
        StepProbe(str(trained[0]), **options)


def test_every_option_stands_in_the_configuration_with_its_default() -> None:
    config = OmegaConf.to_container(OmegaConf.load(Path(apportion.conf.__file__).parent / "prm" / "probe.yaml"))
    given = {name: value for name, value in config.items() if not name.startswith("_")}
    known = inspect.signature(ProbedSteps).parameters
    assert list(given) == list(known)
    settings = given.pop("backbone")["settings"]
    given["strengths"] = tuple(given["strengths"])
    assert given == {name: known[name].default for name in given}
    template = Template(**{name: value for name, value in settings.pop("template").items() if name != "_target_"})
    assert (
        FeatureSettings(template=template, **{n: v for n, v in settings.items() if n != "_target_"})
        == FeatureSettings()
    )
