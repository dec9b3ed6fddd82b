"""What credit costs beside the rest of a step, and what alignment costs beside encoding the texts again.

``python benchmarks/overhead.py [--repeats 7] [--json FILE]`` prints two tables. The time of each strategy
by itself, on long answers, is in ``benchmarks/credit.py``.

First: the offsets of the sampled ids, the batch, the credit of a strategy, and all that is logged of it token by token,
against a whole step: sampling, judging, these parts, and the update. The policies are the embedded one, in its first
state, and a Llama of 8 M parameters; the smaller the policy, the larger the share. The goal is 5%.

Second: token ranges of 5 spans in each of 1,000 completions from their sampled ids, against encoding the texts again
with offsets, by byte-level and by metaspace tokenizers of 8,000 ids trained on the spot. The goal is 0.2 times.

Times are CPU seconds of one thread, medians; what is compared takes turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer

from apportion.credit import Credit, CreditBatch, CreditStrategy, Rollout, assign_credit, collate
from apportion.credit.align import decode_text, spans_table, token_offsets
from apportion.experiments.app import CONFIG_FOLDER, build
from apportion.experiments.parts import build_parts
from apportion.grpo.collect import Collected, collect
from apportion.grpo.loss import LossConfig
from apportion.grpo.metrics import rollout_metrics
from apportion.grpo.policy import Policy
from apportion.grpo.sampling import RolloutConfig
from apportion.grpo.update import OptimConfig, accumulate_gradients, build_optimizer, optimizer_step
from apportion.grpo.window import Window, minibatch_rows
from apportion.verifiers import Span
from apportion.verifiers.panel import Panel

STRATEGIES = (
    "uniform",
    "process/own_step",
    "process/return",
    "process/pure",
    "localized/capo",
    "localized/cliff",
    "format/composed",
    "weights/ktae",
    "weights/trace_decay",
    "sequence/rloo",
)
POLICIES = {
    "embedded": [],
    "8 M": ["policy.hidden_size=256", "policy.layers=8", "policy.intermediate_size=1024"],
}
TRAINED = ("byte-level", "metaspace")
COMPLETIONS, SPANS, CHARACTERS = 1000, 5, 560
SOURCES = ("credit", "prm", "grpo", "verifiers", "experiments", "tests/*")


def medians(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, called in turns after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            began = time.process_time()
            function()
            if turn:
                times[name].append(time.process_time() - began)
    return {name: statistics.median(seen) for name, seen in times.items()}


# --- of a step -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A training step of an untrained policy on the embedded task; the learning rate is zero."""

    policy: Policy
    task: Any
    panel: Panel
    rollout: RolloutConfig
    loss: LossConfig
    optim: OptimConfig
    strategies: Mapping[str, CreditStrategy]

    @classmethod
    def build(cls, overrides: Sequence[str]) -> Step:
        with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
            config = compose("train", overrides=["optim.lr=0.0", *overrides])
            nodes = {name: compose("train", overrides=[f"credit={name}"]).credit for name in STRATEGIES}
        parts, source = build_parts(config), build(config.policy, "policy")
        strategies = {name: build(node, "credit") for name, node in nodes.items()}
        return cls(
            source.build("cpu"),
            build(config.task, "task"),
            Panel(parts.verifiers, parts.reward),
            parts.rollout,
            parts.loss,
            parts.optim,
            strategies,
        )

    def sample(self) -> Collected:
        problems = self.task.batch(1, self.rollout.prompts_per_step, 0)
        return collect(self.policy, problems, self.panel, self.rollout, seed=0, step=1)

    def align(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """The characters of every id; sampling does this too."""
        return [token_offsets(self.policy.tokenizer, r.completion_ids, r.text) for r in rollouts]

    def measure(self, rollouts: Sequence[Rollout], batch: CreditBatch, credit: Credit) -> dict[str, float]:
        return rollout_metrics(rollouts, batch, credit, batch.old_logprobs, success="answer", format="format")

    def update(self, window: Window) -> None:
        optimizer, schedule = build_optimizer(self.policy, self.optim, 1000)
        for rows in minibatch_rows(window.batch.group_ids, minibatches=self.optim.minibatches, seed=0, step=1, epoch=0):
            accumulate_gradients(
                self.policy,
                window,
                rows,
                self.loss,
                micro_batch_rows=self.optim.micro_batch_rows,
                max_tokens=self.rollout.max_new_tokens,
                temperature=self.rollout.temperature,
            )
            optimizer_step(self.policy, optimizer, schedule, max_grad_norm=1.0, step=1)


def share_of_a_step(name: str, repeats: int) -> list[dict[str, Any]]:
    """For each strategy the CPU seconds of a step, and of what credit adds to it."""
    step = Step.build(POLICIES[name])
    rollouts = varied(step.sample().rollouts)
    batch = collate(rollouts)
    window = Window.open(1, rollouts, batch)
    credits = {label: assign_credit(strategy, batch) for label, strategy in step.strategies.items()}
    window.credit = credits["process/own_step"]
    common = {
        "sample": step.sample,
        "align": lambda: step.align(rollouts),
        "collate": lambda: collate(rollouts),
        "update": lambda: step.update(window),
    }
    own: dict[str, Callable[[], object]] = {}
    for label, strategy in step.strategies.items():
        own[f"{label} credit"] = lambda one=strategy: assign_credit(one, batch)
        own[f"{label} measure"] = lambda one=label: step.measure(rollouts, batch, credits[one])
    taken = medians({**common, **own}, repeats)
    found = []
    for label in step.strategies:
        ours = sum(taken[key] for key in ("align", "collate", f"{label} credit", f"{label} measure"))
        whole = ours - taken["align"] + taken["sample"] + taken["update"]  # sampling contains the alignment
        found.append({"policy": name, "strategy": label, "ours": ours, "step": whole, "share": ours / whole, **taken})
    return found


def varied(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same with other rewards and judged spans, as an untrained policy solves nothing: every third is right."""
    changed = []
    for number, rollout in enumerate(rollouts):
        size = max(len(rollout.text) // SPANS, 1)
        spans = [
            Span(start, min(start + size, len(rollout.text)), float((number + start) % 3 != 0), "step")
            for start in range(0, len(rollout.text), size)
        ]
        verdicts = {
            name: replace(verdict, score=float(number % 3 == 0), spans=tuple(spans))
            for name, verdict in rollout.verdicts.items()
        }
        changed.append(replace(rollout, verdicts=verdicts, reward=float(number % 3 == 0)))
    return changed


# --- of alignment ----------------------------------------------------------------------------------------------------


def texts_of(count: int, characters: int) -> list[str]:
    """Pieces of this project's own pages and sources, every fifth with a word of another script; each comes once."""
    root = CONFIG_FOLDER.parent
    files = [
        *sorted(root.glob("docs/*.md")),
        *(path for folder in SOURCES for path in sorted(root.glob(f"{folder}/*.py"))),
    ]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in files)
    draw = random.Random(0)
    pieces = [whole[start : start + characters] for start in range(0, len(whole) - characters, characters)][:count]
    if len(pieces) < count:
        raise SystemExit(f"{len(whole)} characters of text make {len(pieces)} pieces; {count} are needed")
    others = ("première", "größer", "答案", "→", "π", "🙂")
    return [f"{piece} {draw.choice(others)}" if number % 5 == 0 else piece for number, piece in enumerate(pieces)]


def tokenizer_of(kind: str, texts: Sequence[str]) -> Any:
    """A BPE tokenizer trained on ``texts``: of bytes, or of characters with bytes to fall back on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "byte-level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special = ["<eos>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
        special = ["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False, limit_alphabet=256
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def alignment(kind: str, repeats: int) -> dict[str, Any]:
    """CPU seconds for the token ranges of all spans, and for encoding all texts with offsets."""
    sources = texts_of(COMPLETIONS, CHARACTERS)
    tokenizer = tokenizer_of(kind, sources) if kind in TRAINED else AutoTokenizer.from_pretrained(kind)
    ids: list[list[int]] = tokenizer(sources, add_special_tokens=False)["input_ids"]
    texts = [decode_text(tokenizer, row) for row in ids]
    draw = random.Random(1)
    spans = []
    for text in texts:
        cuts = sorted(draw.sample(range(1, len(text)), 2 * SPANS))
        spans.append([Span(start, stop, 1.0, "step") for start, stop in zip(cuts[::2], cuts[1::2])])

    def ours() -> Any:
        return spans_table([token_offsets(tokenizer, row, text) for row, text in zip(ids, texts)], spans, texts)

    def again() -> Any:
        return tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)

    table = ours()
    taken = medians({"ours": ours, "again": again}, repeats)
    return {
        "tokenizer": Path(kind).name,
        "completions": len(texts),
        "tokens": sum(map(len, ids)),
        "found": int(table.mask.sum()),
        "spans": sum(map(len, spans)),
        **taken,
        "ratio": taken["ours"] / taken["again"],
    }


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokenizers", nargs="+", default=[], help="folders or hub names of further ones")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shares = [row for name in POLICIES for row in share_of_a_step(name, options.repeats)]
    print("| policy | strategy | offsets | batch | credit | measures | together | a step | share |")
    print("|---" * 9 + "|")
    for row in shares:
        label = row["strategy"]
        names = ("align", "collate", f"{label} credit", f"{label} measure", "ours", "step")
        cells = " | ".join(f"{1e3 * row[key]:.1f} ms" for key in names)
        print(f"| {row['policy']} | {label} | {cells} | {row['share']:.1%} |")
    aligned = [alignment(kind, options.repeats) for kind in (*TRAINED, *options.tokenizers)]
    print("\n| tokenizer | tokens | spans found | alignment | encoding again | ratio |")
    print("|---" * 6 + "|")
    for row in aligned:
        print(
            f"| {row['tokenizer']} | {row['tokens']:,} | {row['found']} of {row['spans']} | "
            f"{1e3 * row['ours']:.0f} ms | {1e3 * row['again']:.0f} ms | {row['ratio']:.2f} |"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"shares": shares, "alignment": aligned}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
