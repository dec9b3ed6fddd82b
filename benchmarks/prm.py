"""Training throughput of ``train_prm`` against TRL 1.13's ``PRMTrainer``, the last release that had one.

``python benchmarks/prm.py [--model tiny|mid] [--rounds 3]`` prints real tokens per CPU-second of every contestant and
its ratio to TRL's default batches and to its length-grouped ones. TRL 1.13.0 must be importable; without it only our
own ways are compared. All train the same weights for one epoch on the same texts and labels, in float32 and without
activation checkpointing, in an order drawn anew for each round; the time is that of ``Trainer.train``, the base class
of both. Lengths are lognormal with the spread of the solutions in CHAMP (.51 is the deviation of the log).
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

from apportion.prm.model import StepModel
from apportion.prm.steps import StepExample
from apportion.prm.training import PrmTrainingConfig, train_prm

SIZES = {"tiny": (64, 2, 4), "small": (128, 4, 4), "mid": (288, 8, 6)}  # width, layers, heads
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<unk>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")


def backbone(size: str) -> LlamaForCausalLM:
    """A Llama with random weights."""
    width, layers, heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 2,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def solutions(count: int, median: float, sigma: float, seed: int = 0) -> list[StepExample]:
    """Texts of random letters in steps of some twenty, with random labels."""
    numbers = np.random.default_rng(seed)
    found = []
    for number in range(count):
        length = int(np.clip(numbers.lognormal(np.log(median), sigma), 16, 900))
        letters = "".join(LETTERS[index] for index in numbers.integers(0, 36, length))
        prompt, body = letters[: length // 4], letters[length // 4 :]
        texts = [body[start : start + 20] for start in range(0, len(body), 20)]
        ends = np.cumsum([len(text) + 1 for text in texts]).tolist()
        steps = tuple((end - 1 - len(text), end - 1) for end, text in zip(ends, texts, strict=True))
        labels = tuple(map(float, numbers.integers(0, 2, len(texts))))
        found.append(StepExample(prompt, "\n".join(texts), steps, labels, str(number)))
    return found


@contextmanager
def clocked(clock: Callable[[], float], times: list[float]) -> Iterator[None]:
    """Time every ``Trainer.train``."""
    train = Trainer.train

    def timed(self: Trainer, *args: Any, **options: Any) -> Any:
        begun = clock()
        try:
            return train(self, *args, **options)
        finally:
            times.append(clock() - begun)

    Trainer.train = timed
    try:
        yield
    finally:
        Trainer.train = train


def ours(model: StepModel, examples: list[StepExample], **options: Any) -> Callable[[], None]:
    """A run of ``train_prm`` for one epoch."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = PrmTrainingConfig(cpu=True, **options)
            train_prm(copy.deepcopy(model), examples, [], config, folder)

    return run


def theirs(model: StepModel, examples: list[StepExample], rows: int, strategy: str) -> Callable[[], None]:
    """A run of TRL's trainer for one epoch."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset, disable_progress_bars
    from trl.experimental.prm import PRMConfig, PRMTrainer

    disable_progress_bars()
    table = [
        {"prompt": one.prompt + "\n", "completions": one.step_texts, "labels": [label > 0.5 for label in one.labels]}
        for one in examples
    ]

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = PRMConfig(
                output_dir=folder,
                per_device_train_batch_size=rows,
                num_train_epochs=1,
                train_sampling_strategy=strategy,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                log_level="error",
            )
            PRMTrainer(
                model=copy.deepcopy(model.model),
                args=arguments,
                processing_class=model.tokenizer,
                train_dataset=Dataset.from_list(table),
            ).train()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--examples", type=int, default=640)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--median", type=float, default=84, help="of the tokens")
    parser.add_argument("--sigma", type=float, default=0.51, help="of the log of the tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="more spin while they wait, which counts as CPU time")
    parser.add_argument("--only", nargs="*", help="names of contestants")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    examples = solutions(options.examples, options.median, options.sigma)
    model = StepModel.from_backbone(backbone(options.model), tokenizer=tokenizer())
    lengths = [len(one.prompt) + 1 + len(one.completion) for one in examples]
    tokens = sum(lengths)
    budget = int(options.rows * tokens / len(examples))
    contestants = {
        "ours, random, 1 part": ours(model, examples, batch_rows=options.rows, parts=1),
        "ours, random, 4 parts": ours(model, examples, batch_rows=options.rows, parts=4),
        "ours, random, 8 parts (default)": ours(model, examples, batch_rows=options.rows),
        "ours, random, 16 parts": ours(model, examples, batch_rows=options.rows, parts=16),
        "ours, length-grouped rows": ours(model, examples, batch_rows=options.rows, batching="length_grouped", parts=1),
        "ours, length-grouped rows, 4 parts": ours(
            model, examples, batch_rows=options.rows, batching="length_grouped", parts=4
        ),
        "ours, length-grouped tokens": ours(
            model, examples, batch_rows=None, batch_tokens=budget, batching="length_grouped", parts=1
        ),
    }
    try:
        contestants["TRL, default"] = theirs(model, examples, options.rows, "random")
        contestants["TRL, length-grouped"] = theirs(model, examples, options.rows, "group_by_length")
    except ImportError as error:
        print(f"without TRL: {error}")
    if options.only:
        contestants = {name: run for name, run in contestants.items() if any(part in name for part in options.only)}
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters, {len(examples)} examples, {tokens:,} tokens, longest {max(lengths)}")
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds + 1):  # the first round warms up
        for name in random.Random(number).sample(sorted(contestants), len(contestants)):
            times: list[float] = []
            with clocked(time.process_time, times):
                contestants[name]()
            if number:
                speeds[name].append(tokens / sum(times))
    print("| tokens per CPU-second, median (lowest, highest) | | to TRL default | to TRL length-grouped |")
    print("|---|---|---|---|")
    for name, found in sorted(speeds.items(), key=lambda pair: statistics.median(pair[1])):
        ratios = [
            f"{statistics.median(found) / statistics.median(speeds[peer]):.2f}" if peer in speeds else ""
            for peer in ("TRL, default", "TRL, length-grouped")
        ]
        spread = f"{statistics.median(found):,.0f} ({min(found):,.0f}, {max(found):,.0f})"
        print(f"| {name} | {spread} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
