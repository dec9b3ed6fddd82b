"""Hidden states of a frozen language model or text encoder at each step of a solution, computed once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from ..verifiers import InputError
from .backbones import load_body
from .baselines import _rows as step_rows
from .batching import cut_batches
from .encoding import Template, tokenizer_fingerprint
from .feature_rows import Row, causal_row, encoder_rows
from .loading import reading, source_of
from .steps import StepExample

__all__ = ["FeatureSettings", "FrozenBackbone", "StepFeatures"]

_IRRELEVANT = ("_name_or_path", "architectures", "transformers_version", "torch_dtype")  # to the states
_PLACES = 9  # numbers that say where a step stands
_SAME = 1e-5  # of the states, relative to their size
CHUNK = 64  # solutions in one file of the cache: what an interrupted run loses
Context = Literal["problem", "step"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FeatureSettings:
    """Where the features are read.

    Args:
        layers: hidden states to keep: 0 is the embeddings, the number of layers or -1 the last; None takes four, after
            each quarter of the layers.
        template: what a causal model reads; see :class:`~apportion.prm.encoding.Template`.
        context: what an encoder reads with each step: the ``problem`` before it, or the ``step`` alone.
        max_length: most tokens; None: as many as model and tokenizer have positions for.
    """

    layers: tuple[int, ...] | None = None
    template: Template = field(default_factory=Template)
    context: Context = "problem"
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.context not in get_args(Context):
            raise InputError(f"context={self.context}: give one of {', '.join(get_args(Context))}")
        if self.layers is not None and not self.layers:
            raise InputError("layers=[]: give at least one layer, or null")


class StepFeatures(NamedTuple):
    """Features of the N steps of some solutions, one after the other.

    Args:
        states: (N, L, D) float32, the hidden state of each kept layer; NaN where the model did not read the step.
        places: (N, P) where the step stands and how long it is, as in :func:`~apportion.prm.baselines.position_only`.
        layers: which layers the L are, counted from 0.
    """

    states: np.ndarray
    places: np.ndarray
    layers: tuple[int, ...]

    @property
    def known(self) -> np.ndarray:
        """(N,) whether the model read the step."""
        found: np.ndarray = np.isfinite(self.states).all(axis=(1, 2))
        return found

    def where(self, chosen: np.ndarray) -> StepFeatures:
        """The steps of a boolean mask (N,), or of indices."""
        return StepFeatures(self.states[chosen], self.places[chosen], self.layers)


@dataclass(frozen=True, eq=False)
class FrozenBackbone:
    """A transformers model that is only read, never trained.

    A causal model reads problem and solution once; a step's state is that of its last token, which has seen all that
    comes before and nothing after. An encoder, which looks ahead, reads every step for itself; the state is the mean
    over the step's own tokens. Which of the two a model is shows in a small forward.

    Args:
        model: without a head, or with one that is not used.
        tokenizer: its own, fast.
        settings: where to read.
        source: folder or hub name that it came from; None for a model that is in memory only.
    """

    model: Any
    tokenizer: Any
    settings: FeatureSettings = field(default_factory=FeatureSettings)
    source: str | None = None

    def __post_init__(self) -> None:
        if self.model.config.is_encoder_decoder:
            raise InputError(f"backbone: {type(self.model).__name__} has two halves; give a causal model or an encoder")
        self.model.eval()
        outside = [k for k in self.settings.layers or () if not -self.depth - 1 <= k <= self.depth]
        if outside:
            raise InputError(f"layers: {outside[0]} is none of the model's; give 0 to {self.depth}, or -1 for the last")

    @classmethod
    def load(
        cls,
        path: str | Path,
        settings: FeatureSettings | None = None,
        *,
        dtype: str = "float32",
        device: str | None = None,
    ) -> FrozenBackbone:
        """From safetensors; code from the folder is never run.

        Args:
            path: folder, or name on the hub (``owner/name``).
            settings: where to read; None: as by default.
            dtype: of the weights. Features are float32 all the same.
            device: such as ``cuda:0``; None takes a GPU where there is one.
        """
        from transformers import AutoTokenizer

        model = load_body(path, dtype)
        with reading(path):
            tokenizer = AutoTokenizer.from_pretrained(source_of(path), trust_remote_code=False)
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        known = settings or FeatureSettings()
        return cls(model.requires_grad_(False).to(place), tokenizer, known, source_of(path))

    @property
    def depth(self) -> int:
        """Number of layers."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """The kept layers, counted from 0."""
        if self.settings.layers is None:
            return tuple(sorted({max(1, round(self.depth * quarter / 4)) for quarter in (1, 2, 3, 4)}))
        return tuple(layer % (self.depth + 1) for layer in self.settings.layers)

    @cached_property
    def causal(self) -> bool:
        """Whether a token's state stays the same when a later one changes."""
        ids = torch.arange(8) % self.model.get_input_embeddings().num_embeddings
        rows = [Row((*ids.tolist()[:7], int(last)), None, ()) for last in (ids[7], ids[0])]
        one, other = self._hidden(rows)[-1][:, :7].float()
        tolerance = _SAME * max(1.0, float(one.abs().max()))
        return bool(torch.allclose(one, other, rtol=0, atol=tolerance))

    @cached_property
    def digest(self) -> str:
        """Of the weights, their precision and the model's class."""
        found = hashlib.blake2b(type(self.model.base_model).__name__.encode(), digest_size=16)
        for name, tensor in sorted(self.model.base_model.state_dict().items()):
            if not name.startswith("pooler."):
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def features(
        self,
        examples: Sequence[StepExample],
        *,
        labelled_only: bool = False,
        cache: str | Path | None = None,
        batch_tokens: int = 4096,
        progress: Progress | None = None,
    ) -> StepFeatures:
        """The features of every step of the examples, whatever else is in a batch.

        Args:
            examples: E solutions. Where ``metadata`` holds ``completion_ids`` (with ``offsets``) of a policy whose
                ``tokenizer`` fingerprint is the model's, a causal model reads these very ids.
            labelled_only: read no step after a solution's last labelled one: enough to fit a probe, and half the work
                where the labels end at the first wrong step.
            cache: folder for the states; files are named by a hash of weights, token ids, ranges and layers, so that
                they can never be stale. None keeps nothing.
            batch_tokens: in one forward, padding included.
            progress: called after every 64 solutions with how many are done, and of how many.
        """
        folder = None if cache is None else Path(cache).expanduser()
        parts = []
        for start in range(0, len(examples), CHUNK):
            parts.append(self._chunk(examples[start : start + CHUNK], labelled_only, folder, batch_tokens))
            if progress is not None:
                progress(min(start + CHUNK, len(examples)), len(examples))
        width = self.model.config.get_text_config().hidden_size
        states = np.concatenate(parts) if parts else np.empty((0, len(self.layers), width), np.float32)
        places = [place for example in examples for _, place in step_rows(example)]
        return StepFeatures(states, np.array(places, dtype=np.float64).reshape(-1, _PLACES), self.layers)

    def _chunk(
        self, examples: Sequence[StepExample], labelled_only: bool, folder: Path | None, batch_tokens: int
    ) -> np.ndarray:
        """(N, L, D) of some solutions, from the cache where it holds them."""
        found = [pair for example in examples for pair in self._rows(example, labelled_only)]
        count = sum(len(example.steps) for example in examples)
        if folder is None:
            return self._pooled(found, count, batch_tokens)
        file = folder / f"{self._key(found)}.npy"
        if file.is_file():
            return np.load(file, allow_pickle=False)
        states = self._pooled(found, count, batch_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}.part")
        with unfinished.open("wb") as stream:
            np.save(stream, states, allow_pickle=False)
        unfinished.replace(file)
        return states

    def _rows(self, example: StepExample, labelled_only: bool) -> Iterator[tuple[Row, int]]:
        """Rows of a solution, each with how many steps that are not read follow it."""
        known = [place for place, label in enumerate(example.labels, start=1) if label is not None]
        count = max(known, default=0) if labelled_only else len(example.steps)
        read = replace(example, steps=example.steps[:count], labels=example.labels[:count])
        if self.causal:
            facts = example.metadata
            shared = facts.get("completion_ids") is not None and facts.get("tokenizer") == self._fingerprint
            yield causal_row(self.tokenizer, read, self.settings.template, self.max_length, shared=shared)
        else:
            with_problem = self.settings.context == "problem"
            yield from encoder_rows(self.tokenizer, read, self.max_length, problem=with_problem)
        yield Row((), None, ()), len(example.steps) - count

    def _key(self, rows: Sequence[tuple[Row, int]]) -> str:
        config = self.model.config.to_dict()
        facts = {name: config[name] for name in sorted(config) if name not in _IRRELEVANT}
        found = hashlib.blake2b(repr((self.digest, facts, self.layers, rows)).encode(), digest_size=16)
        return found.hexdigest()

    def _pooled(self, rows: Sequence[tuple[Row, int]], count: int, batch_tokens: int) -> np.ndarray:
        """(N, L, D); each row brings the states of its ranges, and how many steps without a state follow."""
        width = self.model.config.get_text_config().hidden_size
        states = np.full((count, len(self.layers), width), np.nan, np.float32)
        starts = np.cumsum([0, *(len(row.ranges) + unread for row, unread in rows)])
        chosen = [number for number, (row, _) in enumerate(rows) if row.ranges]
        lengths = [len(row.input_ids) for row, _ in rows]
        chosen.sort(key=lambda number: -lengths[number])
        for batch in cut_batches(chosen, lengths, None, batch_tokens):
            values = iter(self._states([rows[number][0] for number in batch]))
            for number in batch:
                for step in range(len(rows[number][0].ranges)):
                    states[starts[number] + step] = next(values)
        return states

    @torch.inference_mode()
    def _states(self, rows: Sequence[Row]) -> np.ndarray:
        """(R, L, D) of all ranges of one batch."""
        hidden = self._hidden(rows)
        kept = [hidden[layer] for layer in self.layers]
        ranges = [(number, start, stop) for number, row in enumerate(rows) for start, stop in row.ranges]
        means = [torch.stack([layer[n, a:b].float().mean(dim=0) for n, a, b in ranges]) for layer in kept]
        return torch.stack(means, dim=1).cpu().numpy()

    @torch.inference_mode()
    def _hidden(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """(B, T, D) after the embeddings and after each layer; padded on the right."""
        pad = self.tokenizer.pad_token_id or 0
        inputs = {
            "input_ids": _padded([row.input_ids for row in rows], pad),
            "attention_mask": _padded([[1] * len(row.input_ids) for row in rows], 0),
        }
        if all(row.type_ids is not None for row in rows):
            inputs["token_type_ids"] = _padded([row.type_ids or () for row in rows], 0)
        options: dict[str, Any] = {name: value.to(self.model.device) for name, value in inputs.items()}
        if getattr(self.model.config, "use_cache", False):
            options["use_cache"] = False  # no key is needed again
        states: Sequence[torch.Tensor] = self.model.base_model(**options, output_hidden_states=True).hidden_states
        return states

    @property
    def max_length(self) -> int | None:
        """Most tokens that are read at once."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        known = (self.settings.max_length, positions, self.tokenizer.model_max_length)
        return min((int(limit) for limit in known if limit and 0 < limit < 10**9), default=None)

    @cached_property
    def _fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
