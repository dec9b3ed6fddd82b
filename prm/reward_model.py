"""Any reward model saved as sequence classification, as a verifier of whole answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..verifiers import InputError, Sample, Verdict

__all__ = ["Encoded", "RewardModel", "encode_answer", "load_reward_model", "pooled_logits"]

Layout = Literal["chat", "pair", "text"]
Output = Literal["logit", "sigmoid", "softmax"]
_CHOICES = {
    "layout": (None, "chat", "pair", "text"),
    "output": ("logit", "sigmoid", "softmax"),
    "too_long": ("fault", "abstain"),
    "dtype": ("float32", "bfloat16", "float16"),
}


class Encoded(NamedTuple):
    """A prompt and its answer as a model reads them.

    Args:
        ids: token ids.
        types: segment of each id, where the tokenizer gives them (BERT and its kin), else None.
    """

    ids: list[int]
    types: list[int] | None


@dataclass(frozen=True)
class RewardModel:
    """The score that a reward model gives the answer; it reads prompt and answer, and needs no reference.

    Any ``AutoModelForSequenceClassification``, decoder or encoder, from safetensors; code from the folder is never
    run. The score does not depend on what else is in the batch. A score that is not finite is a fault of its sample.

    Args:
        path: folder, or name on the hub (``owner/name``). Loaded when the first sample comes.
        layout: ``chat`` (a user's and an assistant's turn by the chat template), ``pair`` (two segments, as for many
            encoders) or ``text`` (the answer right behind the prompt); None is chat where there is a template.
        output: ``logit`` as it is, its ``sigmoid``, or the ``softmax`` probability of the label ``positive``. The
            first two need a model with one label, softmax one with several.
        positive: index of the label that means good, for softmax.
        max_length: in tokens, prompt and answer together; None takes what tokenizer and model say.
        too_long: what becomes of an answer that does not fit, as nothing is ever cut: ``fault`` counts it among the
            verifier's errors, ``abstain`` leaves it without a score.
        batch_tokens: in one forward, padding included; a longer answer goes alone.
        dtype: of the weights: float32, bfloat16 or float16.
        device: such as ``cuda:0``; None takes a GPU where there is one.
    """

    spans: ClassVar[bool] = False

    path: str
    layout: Layout | None = None
    output: Output = "logit"
    positive: int = 1
    max_length: int | None = None
    too_long: Literal["fault", "abstain"] = "fault"
    batch_tokens: int = 16384
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                given, known = getattr(self, name), ", ".join(map(str, choices))
                raise InputError(f"the reward model's {name}={given!r} is unknown; give one of {known}")
        for name in ("max_length", "batch_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"the reward model's {name}={value}: must be at least 1")
        _source(self.path)

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        if isinstance(self._loaded, InputError):
            raise self._loaded
        model, tokenizer = self._loaded
        limit = self.max_length or _longest(model, tokenizer)
        verdicts: list[Verdict | Exception] = [Verdict(None)] * len(samples)
        rows: dict[int, Encoded] = {}
        for number, sample in enumerate(samples):
            try:
                row = encode_answer(tokenizer, sample.prompt, sample.completion, self.layout)
                if limit is None or len(row.ids) <= limit:
                    rows[number] = row
                elif self.too_long == "fault":
                    remedy = "raise max_length if the model can read more, or set too_long=abstain"
                    verdicts[number] = ValueError(f"{len(row.ids)} tokens, more than the {limit} that fit; {remedy}")
            except ValueError as error:
                verdicts[number] = error
        for part in _batches({number: len(row.ids) for number, row in rows.items()}, self.batch_tokens):
            for number, score in zip(part, self._scores(pooled_logits(model, [rows[number] for number in part]))):
                finite = torch.isfinite(score)
                verdicts[number] = Verdict(float(score)) if finite else ValueError(f"the model's score is {score}")
        return verdicts

    def prepare(self) -> None:
        """Load the model now, so that a broken one is refused before anything costs time."""
        if isinstance(self._loaded, InputError):
            raise self._loaded

    @property
    def counted_models(self) -> tuple[Any, ...]:
        """Models whose tokens are charged to the run that asks."""
        return () if isinstance(self._loaded, InputError) else (self._loaded[0].base_model,)

    def _scores(self, logits: Tensor) -> Tensor:
        """(R,) from the logits (R, L)."""
        if self.output == "softmax":
            return logits.softmax(dim=-1)[:, self.positive]
        return logits[:, 0].sigmoid() if self.output == "sigmoid" else logits[:, 0]

    @cached_property
    def _loaded(self) -> tuple[Any, Any] | InputError:
        """Model and tokenizer, or why there are none: a verifier at fault is asked again, sample by sample."""
        try:
            return self._load()
        except InputError as error:
            return error

    def _load(self) -> tuple[Any, Any]:
        model, tokenizer = load_reward_model(self.path, dtype=self.dtype, device=self.device)
        labels = model.config.num_labels
        if (labels > 1) != (self.output == "softmax"):
            remedy = "set output=softmax and positive" if labels > 1 else "set output=logit or sigmoid"
            raise InputError(
                f"{self.path}: a model with {labels} labels, so output={self.output} means nothing; {remedy}"
            )
        if self.output == "softmax" and not 0 <= self.positive < labels:
            raise InputError(f"{self.path}: has no label {self.positive}; set positive to one of 0 to {labels - 1}")
        if self.layout == "chat" and not tokenizer.chat_template:
            raise InputError(f"{self.path}: the tokenizer has no chat template; set layout=text or pair")
        return model, tokenizer


def load_reward_model(path: str, *, dtype: str = "float32", device: str | None = None) -> tuple[Any, Any]:
    """A sequence classification model, frozen and in evaluation mode, and its tokenizer.

    Args:
        path: folder, or name on the hub (``owner/name``).
        dtype: of the weights: float32, bfloat16 or float16.
        device: such as ``cuda:0``; None takes a GPU where there is one.

    Raises:
        InputError: nothing there, no safetensors, code of its own, or a head without weights; names ``path``.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = _source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{path}: cannot be loaded as a reward model ({reason}); check the folder's files") from error
    if found["missing_keys"]:  # a language model without a head would judge at random
        missing = sorted(found["missing_keys"])
        raise InputError(
            f"{path}: {len(missing)} tensors have no weights, first {missing[0]}; give a trained reward model"
        )
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval().requires_grad_(False).to(place), tokenizer


def encode_answer(tokenizer: Any, prompt: str, completion: str, layout: Layout | None = None) -> Encoded:
    """Token ids of a prompt and its answer in a layout (see :class:`RewardModel`).

    Special tokens that the answer only spells are read as plain text: it cannot open a turn of its own.

    Raises:
        ValueError: the chat template refuses the text or leaves part of the answer out, or there are no tokens.
    """
    prompt, completion = _well_formed(prompt), _well_formed(completion)
    spelled = any(token.content in completion for token in tokenizer.added_tokens_decoder.values() if token.special)
    if layout == "chat" or (layout is None and tokenizer.chat_template):
        row = Encoded(_chat_ids(tokenizer, prompt, completion, spelled), None)
    else:
        texts = (prompt, completion) if layout == "pair" else (prompt + completion,)
        read = tokenizer(*texts, split_special_tokens=spelled, verbose=False)
        row = Encoded(list(read["input_ids"]), read.get("token_type_ids"))
    if not row.ids:
        raise ValueError("prompt and answer make no token")
    return row


def _chat_ids(tokenizer: Any, prompt: str, completion: str, spelled: bool) -> list[int]:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template is a program: it raises what it likes
        raise ValueError(f"the chat template refuses the text ({error})") from error
    start = text.rfind(completion.strip())
    if start < 0:
        raise ValueError("the chat template leaves part of the answer out; set layout=text")
    stop = start + len(completion.strip())
    pieces = (text[:start], text[start:stop], text[stop:]) if spelled else (text,)
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        split = spelled and number == 1
        ids += tokenizer(piece, add_special_tokens=False, split_special_tokens=split, verbose=False)["input_ids"]
    return ids


@torch.inference_mode()
def pooled_logits(model: Any, rows: Sequence[Encoded]) -> Tensor:
    """(R, L) float32 on the CPU: what a sequence classification model says of each row, whatever the others are.

    Rows are padded on the right. Decoders read the last token that is not the padding id of their configuration;
    where that is missing, an id is taken that ends none of the rows, so that each is read at its very last token.
    """
    config = model.config.get_text_config()
    given = config.pad_token_id
    ends = {row.ids[-1] for row in rows}
    padding = given if given is not None else next(free for free in range(len(ends) + 1) if free not in ends)
    inputs = {
        "input_ids": _padded([row.ids for row in rows], padding),
        "attention_mask": _padded([[1] * len(row.ids) for row in rows], 0),
    }
    if all(row.types is not None for row in rows):
        inputs["token_type_ids"] = _padded([row.types or [] for row in rows], 0)
    config.pad_token_id = padding
    try:
        return model(**{name: value.to(model.device) for name, value in inputs.items()}).logits.float().cpu()
    finally:
        config.pad_token_id = given


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def _batches(lengths: dict[int, int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows of like length together, longest first, so that memory runs out at once or never."""
    part: list[int] = []
    for number in sorted(lengths, key=lambda number: -lengths[number]):
        if part and (len(part) + 1) * lengths[part[0]] > batch_tokens:
            yield part
            part = []
        part.append(number)
    if part:
        yield part


def _longest(model: Any, tokenizer: Any) -> int | None:
    """Tokens that tokenizer and model say they can read, or None where neither says."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = [length for length in (tokenizer.model_max_length, positions) if length and 0 < length < 10**9]
    return int(min(known)) if known else None


def _source(path: str) -> str:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if folder.is_absolute() or str(path).count("/") != 1 or str(path)[0] in ".~":
        raise InputError(f"{path}: no such folder, nor the name of a model on the hub (owner/name)")
    return str(path)


def _well_formed(text: str) -> str:
    """Lone surrogates, which no tokenizer reads, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
