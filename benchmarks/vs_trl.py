"""One GRPO step of this package against one of TRL: same model, prompts, batch and lengths, on one core.

``python benchmarks/vs_trl.py [--sizes tiny mid] [--steps 5] [--json FILE]`` prints a table of three parts.
Time: both trainers take turns in one process, step by step, and each step's process CPU seconds are divided by the
tokens that it sampled; once with every group alive and once with half of them dead (all rewards equal).
Memory and start: each trainer in processes of its own; TRL also with 4 accumulation steps, its frugal setting.
Floor: the step's matrix products at the measured speed of such products.

Needs ``pip install "apportion[peers]"``. 8 prompts of 10-14 tokens, 8 completions of up to 64 tokens each, temperature
1, float32, AdamW, no KL, loss "grpo". A completion ends at each token with chance 1 in 64, whatever the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPTS, GROUP, LIMIT = 8, 8, 64
ALPHABET = string.ascii_letters + string.digits  # then ideographs
SIDES = ("ours", "trl", "trl-accumulating")


@dataclass(frozen=True)
class Size:
    """A Llama: 1 in 64 of its tokens ends a completion."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int

    @property
    def ends(self) -> int:
        return self.vocabulary // 64

    @property
    def matrices(self) -> int:
        """Weights that a token is multiplied with, the tied vocabulary projection included."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        return self.layers * layer + self.hidden * self.vocabulary


SIZES = {"tiny": Size(128, 4, 4, 384, 64), "mid": Size(256, 8, 4, 768, 4096)}


# --- what both sides share -------------------------------------------------------------------------------------------


def tokenizer_of(size: Size) -> Any:
    """One character a token; the first id is the end token, the second stands for unknown characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<eos>", "<unk>", *map(symbol, range(2, size.vocabulary))]
    backend = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>", padding_side="left"
    )


def symbol(index: int) -> str:
    """The character of an id from 2 on."""
    return ALPHABET[index - 2] if index < len(ALPHABET) + 2 else chr(0x4E00 + index)


def model_of(size: Size) -> Any:
    """Random weights, the same on both sides."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(range(size.ends)),
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def prompts_of(size: Size) -> list[str]:
    draw = random.Random(0)
    return [
        "".join(symbol(draw.randrange(size.ends + 2, size.vocabulary)) for _ in range(draw.randint(10, 14)))
        for _ in range(PROMPTS)
    ]


def rewards_of(prompts: Sequence[str], dead: Sequence[str]) -> list[float]:
    """Every other completion of a prompt is right, of a dead prompt none."""
    seen: Counter[str] = Counter()
    rewards = []
    for prompt in prompts:
        seen[prompt] += 1
        rewards.append(float(seen[prompt] % 2 and prompt not in dead))
    return rewards


@dataclass
class Clock:
    """CPU seconds and sampled tokens of each step of one side."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0

    def start(self) -> None:
        self.began = time.process_time()

    def stop(self) -> None:
        self.seconds.append(time.process_time() - self.began)

    def per_token(self, skip: int) -> list[float]:
        """Milliseconds a token, the first ``skip`` steps left out."""
        return [1000 * s / t for s, t in zip(self.seconds[skip:], self.tokens[skip:])]


# --- the two sides ---------------------------------------------------------------------------------------------------


def run_ours(size: Size, steps: int, dead: Sequence[str], clock: Clock, turn: Callable[[], None]) -> None:
    """``steps`` steps of our trainer; ``turn`` lets the other side go after each."""
    from apportion.credit.uniform import Uniform
    from apportion.grpo.loss import LossConfig
    from apportion.grpo.policy import Policy
    from apportion.grpo.sampling import RolloutConfig
    from apportion.grpo.task import Problem
    from apportion.grpo.trainer import Trainer, TrainerConfig
    from apportion.grpo.update import OptimConfig

    tokenizer, texts = tokenizer_of(size), prompts_of(size)

    class Task:
        def batch(self, *_: Any, **__: Any) -> list[Problem]:
            return [Problem(str(index), text) for index, text in enumerate(texts)]

        def held_out(self) -> list[Problem]:
            return []

        retention = held_out

    def answer(samples: Sequence[Any]) -> list[float]:
        return rewards_of([sample.prompt for sample in samples], dead)

    def on_step(step: int, metrics: Any) -> None:
        if step:
            clock.stop()
            clock.tokens.append(int(metrics["cost/tokens"]))
            turn()
        clock.start()

    policy = Policy(model_of(size), tokenizer, lambda text: list(tokenizer(text)["input_ids"]), tuple(range(size.ends)))
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            policy,
            Task(),
            {"answer": answer},
            {"answer": 1.0},
            Uniform(),
            rollout=RolloutConfig(prompts_per_step=PROMPTS, group_size=GROUP, max_new_tokens=LIMIT),
            loss=LossConfig(aggregation="seq-mean-token-mean"),
            optim=OptimConfig(lr=1e-6, minibatches=1),
            config=TrainerConfig(steps=steps, eval_every=0, save_every=0, rollouts_every=0, reference_kl=False),
            folder=Path(folder),
            on_step=on_step,
        ).train()


def run_trl(
    size: Size, steps: int, dead: Sequence[str], clock: Clock, turn: Callable[[], None], accumulation: int = 1
) -> None:
    """``steps`` steps of TRL's trainer, tuned for a small CPU run: no bf16, no gradient checkpointing."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sampled: list[int] = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.append(sum(map(len, completion_ids)))
        return rewards_of(prompts, dead)

    class Turns(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop()
            clock.tokens.append(sum(sampled))
            sampled.clear()
            turn()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * GROUP // accumulation,
            gradient_accumulation_steps=accumulation,
            num_generations=GROUP,
            max_completion_length=LIMIT,
            max_steps=steps,
            learning_rate=1e-6,
            beta=0.0,
            loss_type="grpo",
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=10,
            disable_tqdm=True,
        )
        GRPOTrainer(
            model_of(size),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts_of(size)}),
            processing_class=tokenizer_of(size),
            callbacks=[Turns()],
        ).train()


def run_side(side: str, size: Size, steps: int, dead: Sequence[str], clock: Clock, turn: Callable[[], None]) -> None:
    if side == "ours":
        run_ours(size, steps, dead, clock, turn)
    else:
        run_trl(size, steps, dead, clock, turn, 4 if side == "trl-accumulating" else 1)


# --- what is measured ------------------------------------------------------------------------------------------------


def taking_turns(size: Size, steps: int, dead: Sequence[str]) -> dict[str, Clock]:
    """Both trainers in one process, one step each in turn; the first steps are not looked at."""
    clocks = {"ours": Clock(), "trl": Clock()}
    mine, theirs = threading.Semaphore(0), threading.Semaphore(0)
    fault: list[BaseException] = []

    def back() -> None:
        mine.release()
        theirs.acquire()

    def other() -> None:
        theirs.acquire()
        try:
            run_trl(size, steps, dead, clocks["trl"], back)
        except BaseException as error:  # else the first thread would wait for ever
            fault.append(error)
        mine.release()

    def turn() -> None:
        theirs.release()
        mine.acquire()
        if fault:
            raise fault[0]

    thread = threading.Thread(target=other)
    thread.start()
    run_ours(size, steps, dead, clocks["ours"], turn)
    theirs.release()
    thread.join()
    return clocks


def alone(side: str, name: str, steps: int) -> None:
    """One trainer in this process; prints when its first step was done and the process's peak memory."""
    first: list[dict[str, float]] = []

    def turn() -> None:
        if not first:
            first.append({"wall": time.time(), "cpu": time.process_time()})

    run_side(side, SIZES[name], steps, (), Clock(), turn)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT", json.dumps({**first[0], "peak_mb": peak}))


def in_process(side: str, name: str, steps: int) -> dict[str, float]:
    """Seconds from process start to the end of the first step (wall, CPU), and peak memory in MB."""
    began = time.time()
    command = [sys.executable, __file__, "--alone", side, "--sizes", name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{side} on {name}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(lines[0].removeprefix("RESULT "))
    return {**result, "wall": result["wall"] - began}


def matmul_gflops(size: Size) -> float:
    """Measured speed of the model's own products, in 10^9 operations a second."""
    import torch

    left, right = torch.randn(700, size.hidden), torch.randn(size.hidden, size.ffn)
    rates = []
    for _ in range(7):
        began = time.process_time()
        for _ in range(50):
            left @ right
        rates.append(50 * 2 * left.shape[0] * right.numel() / (time.process_time() - began) / 1e9)
    return statistics.median(rates)


def floor_ms(size: Size, gflops: float, mean_length: float) -> float:
    """Milliseconds a token that the step's matrix products alone take: 2 operations a weight to sample a token, and 6
    to train on it, the prompts once, and attention's products; nothing is padded and nothing formed twice."""
    rows = PROMPTS * GROUP
    tokens = rows * mean_length
    weights = size.matrices * (tokens + PROMPTS * 12)
    attention = size.layers * 2 * size.hidden * rows * mean_length * (12 + mean_length / 2)
    return (2 + 6) * (weights + attention) / gflops / 1e6 / tokens


@dataclass(frozen=True)
class Row:
    """A line of the table: the ratio is ours over the peer's, each a median."""

    size: str
    what: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    target: float | None


def time_rows(name: str, steps: int, skip: int) -> tuple[list[Row], dict[str, Any]]:
    size, rows, raw = SIZES[name], [], {}
    for what, dead, target in (
        ("ms/token, all groups alive", (), {"tiny": 0.60, "mid": 0.53}[name]),
        ("ms/token, half of them dead", prompts_of(size)[: PROMPTS // 2], 0.45),
    ):
        clocks = taking_turns(size, steps + skip, dead)
        ours, theirs = (statistics.median(clocks[side].per_token(skip)) for side in ("ours", "trl"))
        rows.append(Row(name, what, "trl", ours, theirs, ours / theirs, target))
        raw[what] = {side: asdict(clock) for side, clock in clocks.items()}
    gflops, ours = matmul_gflops(size), rows[0].ours
    floor = floor_ms(size, gflops, statistics.mean(clocks["ours"].tokens) / (PROMPTS * GROUP))
    what = f"ms/token, all groups alive, products at {gflops:.0f} GFLOP/s"
    return [*rows, Row(name, what, "floor", ours, floor, ours / floor, None)], raw


def process_rows(name: str, steps: int, repeats: int) -> tuple[list[Row], dict[str, Any]]:
    found = {side: [in_process(side, name, steps) for _ in range(repeats)] for side in SIDES}

    def of(side: str, key: str) -> float:
        return statistics.median(run[key] for run in found[side])

    lines = [
        ("peak MB", "trl", "peak_mb", {"tiny": 0.6, "mid": 0.4}[name]),
        ("peak MB", "trl-accumulating", "peak_mb", {"tiny": 0.85, "mid": 0.75}[name]),
        ("first step done after, CPU s", "trl", "cpu", 0.75),
        ("first step done after, wall s", "trl", "wall", 0.75),
    ]
    rows = [
        Row(name, what, peer, of("ours", key), of(peer, key), of("ours", key) / of(peer, key), target)
        for what, peer, key, target in lines
    ]
    return rows, found


def table(rows: Sequence[Row]) -> str:
    head = "| model | what | peer | ours | peer's | ratio | target |\n|---|---|---|---|---|---|---|"
    lines = [
        f"| {r.size} | {r.what} | {r.peer} | {r.ours:.3g} | {r.theirs:.3g} | {r.ratio:.2f} | "
        f"{'' if r.target is None else f'{r.target:.2f}'} |"
        for r in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--skip", type=int, default=1, help="first steps that are not looked at")
    parser.add_argument("--repeats", type=int, default=3, help="processes for memory and start")
    parser.add_argument("--only", choices=("time", "processes"), help="leave the other part out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if options.alone:
        alone(options.alone, options.sizes[0], options.steps)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for name in options.sizes:
        if options.only != "processes":
            more, raw[f"{name} time"] = time_rows(name, options.steps, options.skip)
            rows += more
        if options.only != "time":
            more, raw[f"{name} processes"] = process_rows(name, 2, options.repeats)
            rows += more
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "raw": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
