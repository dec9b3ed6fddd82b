"""A language model that says of every step of a solution how likely it is right."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..verifiers import InputError
from .encoding import Encoded
from .loading import (
    architecture_of,
    head_names,
    initialise,
    load_model,
    loader_of,
    positions_of,
    read_folder,
    reading,
    source_of,
    token_id,
    with_head,
)
from .reader import StepReader
from .settings import FILE, StepSettings

__all__ = ["StepModel"]

_SAME = 1e-5  # of log-odds, relative to their size


class StepModel(nn.Module):
    """A causal transformers model, its tokenizer, and how steps are read with them.

    The log-odds of "right" at the token that ends a step (Lightman et al. 2023, arXiv 2305.20050):
    ``z_1 - z_0`` of a head with two labels, ``z`` of one with one label, or ``z_+ - z_-`` of two tokens of the
    vocabulary, which is the softmax over these two (Wang et al. 2023, arXiv 2312.08935). As a module it is called with
    the tensors of a :class:`~apportion.prm.encoding.StepBatch`.

    Args:
        model: a token classification model, or a causal language model for the style ``tokens``.
        tokenizer: its tokenizer, fast.
        settings: how to read it.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: StepSettings) -> None:
        super().__init__()
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.token_ids: tuple[int, int] | None = None
        if settings.style == "tokens":
            right, wrong = (token_id(tokenizer, token) for token in settings.tokens)
            self.token_ids = right, wrong
            if model.get_output_embeddings() is None:
                raise InputError(f"style=tokens: {type(model).__name__} is no language model; use style=head")
        elif model.config.num_labels not in (1, 2):
            raise InputError(f"style=head: the model has {model.config.num_labels} labels; two or one are needed")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str | None = "float32",
        settings: Mapping[str, Any] | None = None,
    ) -> StepModel:
        """A saved reward model, in evaluation mode.

        A folder without ``prm.json`` is read as TRL's PRM trainer left it, or as Qwen's PRM if its architecture is
        that; a language model without one needs ``settings`` with ``style: tokens``.

        Args:
            path: folder, or name on the hub; weights as safetensors.
            dtype: of the weights; None: as stored.
            settings: values of ``prm.json`` to replace, or to give where there is none.
        """
        config, tokenizer, known = read_folder(path, settings or {})
        model, missing = load_model(path, loader_of(known.style, architecture_of(config)), dtype)
        if missing:
            raise InputError(f"{path}: {len(missing)} tensors have no weights, first {missing[0]}; get a whole copy")
        return cls(model, tokenizer, known).checked(path)

    @classmethod
    def from_backbone(
        cls,
        backbone: Any,
        *,
        tokenizer: Any = None,
        labels: int = 2,
        seed: int = 0,
        dtype: str | None = "float32",
        settings: Mapping[str, Any] | None = None,
    ) -> StepModel:
        """A reward model to be trained: a causal language model, with a new head in the style ``head``.

        The head depends on the seed alone: weights are normal with the model's initial deviation, biases 0.

        Args:
            backbone: folder or name on the hub, or a model in memory, which is copied.
            tokenizer: of a model in memory.
            labels: of the head, 2 or 1.
            seed: of the head.
            dtype: of the weights; None: as stored. A model in memory keeps its own.
            settings: what differs from :class:`~apportion.prm.settings.StepSettings`.
        """
        from transformers import AutoTokenizer

        known = StepSettings().changed(settings or {})
        if isinstance(backbone, str | Path):
            extra = {"num_labels": labels} if known.style == "head" else {}
            model, missing = load_model(backbone, loader_of(known.style, ""), dtype, **extra)
            unknown = set(missing) - set(head_names(model)) if known.style == "head" else missing
            if unknown:
                raise InputError(f"{backbone}: {len(unknown)} tensors have no weights, first {min(unknown)}")
            if tokenizer is None:
                with reading(backbone):
                    tokenizer = AutoTokenizer.from_pretrained(source_of(backbone))
        elif tokenizer is None:
            raise InputError("from_backbone: give the tokenizer of a model in memory")
        elif known.style == "head":
            model = with_head(backbone, labels)
            missing = head_names(model)
        else:
            model, missing = copy.deepcopy(backbone), []
        if known.style == "head":
            initialise(model, missing, seed)
            if labels == 2:
                model.config.id2label, model.config.label2id = {0: "wrong", 1: "right"}, {"wrong": 0, "right": 1}
        return cls(model, tokenizer, known).checked(backbone if isinstance(backbone, str | Path) else "backbone")

    def save_pretrained(self, folder: str | Path) -> None:
        """The model and its tokenizer as transformers saves them, and ``prm.json``."""
        folder = Path(folder)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        unfinished = folder / f"{FILE}.part"
        unfinished.write_text(self.settings.to_json(), encoding="utf-8")
        unfinished.replace(folder / FILE)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def reader(self) -> StepReader:
        """What turns a solution into tokens for this model."""
        embeddings = self.model.get_input_embeddings().num_embeddings
        return StepReader(self.tokenizer, self.settings, positions_of(self.model.config), embeddings)

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer; sampled ids are read where the policy's is the same."""
        return self.reader.fingerprint

    @property
    def max_length(self) -> int | None:
        """Most tokens: what the settings say, but no more than the model has positions for."""
        return self.reader.max_length

    def encode(
        self,
        prompt: str,
        completion: str,
        steps: Sequence[tuple[int, int]],
        metadata: Mapping[str, Any] | None = None,
        *,
        max_length: int | None = None,
    ) -> Encoded:
        """The row of tokens of a solution, see :meth:`apportion.prm.reader.StepReader.encode`."""
        return self.reader.encode(prompt, completion, steps, metadata, max_length=max_length)

    def step_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        step_rows: Tensor,
        step_positions: Tensor,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """(S,) float32: log-odds of "right" of each step. Never more logits than two a token.

        Args:
            input_ids: (B, T), padded on the right.
            attention_mask: (B, T); None will do, since a causal model does not see padding on the right.
            step_rows, step_positions: (S,) row and token of each step.
            position_ids: (B, T), where several texts share a row.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        if self.token_ids is None:
            logits = self.model(**inputs).logits[step_rows, step_positions].float()
            return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        hidden = self.model.base_model(**inputs).last_hidden_state[step_rows, step_positions]
        logits = self._two_logits(hidden)
        return logits[:, 0] - logits[:, 1]

    forward = step_logits

    def _two_logits(self, hidden: Tensor) -> Tensor:
        """(S, 2) of the tokens for right and wrong, scaled and capped as the model does it."""
        output = self.model.get_output_embeddings()
        ids = list(self.token_ids or ())
        bias = getattr(output, "bias", None)
        logits = nn.functional.linear(hidden, output.weight[ids], None if bias is None else bias[ids]).float()
        config = self.model.config.get_text_config()
        logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def checked(self, name: str | Path) -> StepModel:
        """Itself in evaluation mode, after a small forward: it must not look ahead nor change its logits unseen."""
        self.eval()
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(8, device=self.device)
        rows = torch.stack([ids, torch.where(ids < 4, ids, ids + 1)]) % vocabulary
        places = torch.arange(8, device=self.device)
        one, other = (self.step_logits(rows, None, torch.full_like(places, row), places)[:4] for row in (0, 1))
        tolerance = _SAME * max(1.0, float(one.abs().max()))
        if not torch.allclose(one, other, rtol=0, atol=tolerance):
            raise InputError(f"{name}: {type(self.model).__name__} looks ahead; a causal reward model is needed")
        if self.token_ids is not None:
            right, wrong = self.token_ids
            whole = self.model(input_ids=rows[:1], use_cache=False).logits[0, :4].float()
            own = whole[:, right] - whole[:, wrong]
            if not torch.allclose(one, own, rtol=1e-2, atol=1e-2 * max(1.0, float(own.abs().max()))):
                raise InputError(
                    f"{name}: {type(self.model).__name__} changes its logits in a way not known here; use style=head"
                )
        return self
