"""Reading reward models and backbones from disk, the hub or memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..verifiers import InputError
from .settings import FILE, QWEN, TRL, StepSettings

__all__ = [
    "QWEN_CLASS",
    "architecture_of",
    "head_names",
    "initialise",
    "load_model",
    "loader_of",
    "positions_of",
    "quiet_files",
    "read_folder",
    "reading",
    "source_of",
    "token_id",
    "with_head",
]

QWEN_CLASS = "Qwen2ForProcessRewardModel"


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Tells faults of a folder or the hub in one line."""
    from safetensors import SafetensorError

    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{path}: cannot be read as a reward model ({reason})") from error


def source_of(path: str | Path) -> str:
    """The folder, or the name on the hub (owner/name)."""
    folder = Path(path).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or str(path).count("/") != 1 or str(path)[0] in ".~"):
        raise InputError(f"path={path}: no such folder, nor the name of a model on the hub (owner/name)")
    return str(folder) if folder.is_dir() else str(path)


def read_folder(path: str | Path, changes: Mapping[str, Any]) -> tuple[Any, Any, StepSettings]:
    """Configuration, tokenizer and settings of a saved reward model, without its weights.

    Without ``prm.json`` a token classifier is read as TRL's PRM trainer left it, Qwen's PRM in its own way, and a
    language model only where the changes say in which style.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import cached_file

    source = source_of(path)
    if not (Path(source) / "config.json").is_file():
        if (Path(source) / "probe.json").is_file():
            raise InputError(f"{path}: is a probe; use verifier=step_probe, which reads its backbone too")
        if (Path(source) / "model" / "config.json").is_file():
            raise InputError(f"{path}: is the folder of a run; give {path}/model")
    with reading(path):
        config = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        file = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False)
    architecture = architecture_of(config)
    if file is not None:
        return config, tokenizer, StepSettings.from_file(Path(file)).changed(changes)
    if architecture == QWEN_CLASS:
        return config, tokenizer, QWEN.changed(changes)
    if architecture.endswith("ForTokenClassification"):
        return config, tokenizer, TRL.changed(changes)
    if "style" in changes:
        return config, tokenizer, StepSettings().changed(changes)
    if architecture.endswith("ForSequenceClassification"):
        raise InputError(f"{path}: scores whole answers and no steps; use verifier=reward_model")
    raise InputError(
        f"{path}: has no {FILE} and is a {architecture or 'model of no kind'}; say how it is read, "
        "for example settings.style=tokens"
    )


def architecture_of(config: Any) -> str:
    """The class that the weights were saved from."""
    return str((config.architectures or [""])[0])


def positions_of(config: Any) -> int | None:
    """Most tokens that the model has positions for."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


def loader_of(style: str, architecture: str) -> Any:
    """The class that reads a model of this style."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2ForTokenClassification

    if style == "tokens":
        return AutoModelForCausalLM
    if architecture != QWEN_CLASS:
        return AutoModelForTokenClassification

    class Qwen2ForProcessRewardModel(Qwen2ForTokenClassification):
        """Qwen2.5-Math-PRM (arXiv 2501.07301): a head of two layers."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            size = config.hidden_size
            self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, config.num_labels))

    return Qwen2ForProcessRewardModel


@contextmanager
def quiet_files() -> Iterator[None]:
    """Without the library's bars and tables for the reading and writing of weights."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a table of weights that a new head lacks would look like a fault
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def load_model(path: str | Path, loader: Any, dtype: str | None, **options: Any) -> tuple[Any, list[str]]:
    """The model, and the names of the tensors that it lacks."""
    with reading(path), quiet_files():
        model, found = loader.from_pretrained(
            source_of(path),
            dtype="auto" if dtype is None else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    return model, sorted(found["missing_keys"])


def with_head(backbone: Any, labels: int) -> Any:
    """A token classifier with a copy of the language model's body."""
    from transformers import AutoModelForTokenClassification

    config = copy.deepcopy(backbone.config)
    config.num_labels = labels
    with reading("backbone"), torch.random.fork_rng(devices=[]):
        model = AutoModelForTokenClassification.from_config(config, dtype=backbone.dtype)
    model.base_model.load_state_dict(backbone.base_model.state_dict())
    return model.to(backbone.device)


def head_names(model: Any) -> list[str]:
    """Names of the parameters outside the body."""
    return [name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")]


def initialise(model: Any, names: Iterable[str], seed: int) -> None:
    """Set matrices to normal numbers of the model's initial deviation, everything else to 0; by the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    spread = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    with torch.no_grad():
        for name in sorted(names):
            parameter = model.get_parameter(name)
            drawn = torch.zeros(parameter.shape)
            if parameter.dim() > 1:
                drawn.normal_(0, spread, generator=generator)
            parameter.copy_(drawn)


def token_id(tokenizer: Any, token: str | int) -> int:
    """The one id of a named token: as the tokenizer writes it alone, else as the vocabulary spells it."""
    if isinstance(token, int):
        return token
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        return int(ids[0])
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise InputError(f"tokens: {token!r} is no single token of the reward model's vocabulary; give another, or ids")
    return int(found)
