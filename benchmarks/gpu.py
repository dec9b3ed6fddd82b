"""One look at a GPU, in under four minutes: tests, rollouts, steps and memory at three sizes, beside vLLM and TRL.

``python benchmarks/gpu.py [--out FOLDER] [--seconds 230]`` writes ``gpu.json`` and ``gpu.svg``; ``--toy`` runs a small
model, on a CPU too. What the time left does not allow, or is not installed, is left out, and the JSON says why.

The models have random weights, in float32 under bf16 autocast (float32 on a CPU), the shapes of SmolLM2-135M,
Qwen2.5-0.5B and Qwen2.5-1.5B, and so many end tokens that a completion ends at each token with chance 2 in the limit.
A step is 8 prompts of 128 tokens with 8 completions each: sampling, and one update with AdamW of the answers, every
group alive. Utilisation is 6 operations a weight and token, plus attention's, over the peak of the data sheet where
the device is known, else the measured one. vLLM and TRL run in processes of their own, which a timeout ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROMPTS, GROUP = 8, 8
ROOT = Path(__file__).resolve().parent.parent
PEAKS = {"H100": 9.89e14, "H200": 9.89e14, "A100": 3.12e14}  # bf16, dense, of the data sheets
RESULT = "RESULT "  # what a child process has to tell stands behind this


@dataclass(frozen=True)
class Size:
    """The shape of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    prompt: int = 128
    limit: int = 256

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a completion: two in so many as the limit has tokens."""
        return tuple(range(max(2 * self.vocabulary // self.limit, 1)))


SIZES = {
    "135M": Size(576, 30, 9, 3, 1536, 49_152),
    "0.5B": Size(896, 24, 14, 2, 4864, 151_936),
    "1.5B": Size(1536, 28, 12, 2, 8960, 151_936),
}
TOY = {"toy": Size(64, 2, 4, 2, 128, 512, prompt=16, limit=24)}


class Budget:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def run(self, needs: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``work`` finds, or why it was left out: no time, no memory, no library, or what it raised."""
        if self.left < needs:
            return {"skipped": f"needs about {needs:.0f} s, and {max(self.left, 0):.0f} s were left"}
        began = time.monotonic()
        try:
            found = work()
        except torch.OutOfMemoryError as error:
            found = {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
        except Exception as error:  # one part must not take the others with it
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        release()
        return {**found, "took_seconds": round(time.monotonic() - began, 1)}


# --- the device ------------------------------------------------------------------------------------------------------


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Bytes: on CUDA since the last release, elsewhere of the process so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Median wall seconds of a call, the device's work included, after one to warm up."""
    taken = []
    for turn in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        function()
        synchronize()
        if turn:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe_device() -> dict[str, Any]:
    """Its name, and the speed of matrix products: measured, and of the data sheet where it is known."""
    cuda = torch.cuda.is_available()
    side, kind = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    left, right = torch.randn(2, side, side, device=device()).to(kind)
    measured = 10 * 2 * side**3 / seconds(lambda: [left @ right for _ in range(10)])
    name = torch.cuda.get_device_name() if cuda else "cpu"
    sheet = next((peak for known, peak in PEAKS.items() if known in name), None)
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else None
    return {
        "name": name,
        "torch": torch.__version__,
        "memory_bytes": memory,
        "matmul_flops": measured,
        "peak_flops": sheet or measured,
        "peak_is": "data sheet" if sheet else "measured",
    }


# --- ours ------------------------------------------------------------------------------------------------------------


def model_of(size: Size) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.prompt + size.limit,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(size.ends),
        pad_token_id=0,
    )
    with torch.device(device()):
        return LlamaForCausalLM(config).eval()


def policy_of(size: Size) -> Any:
    from apportion.grpo.policy import Policy

    precision = "bf16" if torch.cuda.is_available() else "fp32"
    return Policy(model_of(size), None, lambda text: [int(one) for one in text.split()], size.ends, precision)


def prompts_of(size: Size) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(len(size.ends), size.vocabulary) for _ in range(size.prompt)] for _ in range(PROMPTS)]


def sample(engine: Any, size: Size, seed: int) -> Any:
    """The completions of a step."""
    from apportion.grpo.engines import SamplingOptions

    seeds = [seed * PROMPTS * GROUP + row for row in range(PROMPTS * GROUP)]
    return engine.generate(prompts_of(size), GROUP, SamplingOptions(size.limit), row_seeds=seeds)


def rollouts(engine: Any, size: Size) -> tuple[dict[str, float], Any]:
    """How fast the completions of a step come, and the completions."""
    made: list[Any] = []
    taken = seconds(lambda: made.append(sample(engine, size, 1)), repeats=1)
    tokens = sum(len(one.ids) for one in made[-1])
    return {"seconds": taken, "tokens": tokens, "tokens_per_second": tokens / taken}, made[-1]


def measure(size: Size, peak: float) -> dict[str, Any]:
    """Rollouts and updates of our own."""
    from apportion.experiments.cost_model import size_of
    from apportion.grpo.engines.native import NativeEngine

    policy = policy_of(size)
    engine = NativeEngine(policy)
    native, generations = rollouts(engine, size)
    sampling_memory = peak_memory()
    window = window_of(size, generations)
    taken = seconds(updating(policy, window, size), repeats=2)
    completion = int(window.batch.completion_mask.sum())
    flops = 3 * size_of(policy.model).forward_flops(
        completion + PROMPTS * size.prompt, context=size.prompt + completion / PROMPTS / GROUP / 2, predicted=completion
    )
    return {
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "rollout": {**native, "peak_bytes": sampling_memory},
        "update": {
            "seconds": taken,
            "tokens": completion,
            "tokens_per_second": completion / taken,
            "flops": flops,
            "utilisation": flops / taken / peak,
            "peak_bytes": peak_memory(),
        },
        "step_seconds": native["seconds"] + taken,
        "step_seconds_per_1000_tokens": 1000 * (native["seconds"] / native["tokens"] + taken / completion),
    }


def window_of(size: Size, generations: Sequence[Any]) -> Any:
    """The rollout batch with credit on every answer: half of each group is right."""
    from apportion.credit import Rollout, assign_credit, collate
    from apportion.credit.uniform import Uniform
    from apportion.grpo.window import Window

    prompts = prompts_of(size)
    made = [
        Rollout(
            prompts[row // GROUP],
            one.ids,
            one.logprobs,
            [(at, at + 1) for at in range(len(one.ids))],
            "x" * len(one.ids),
            row // GROUP,
            reward=float(row % 2),
        )
        for row, one in enumerate(generations)
    ]
    window = Window.open(1, made, collate(made))
    window.credit = assign_credit(Uniform(), window.batch)
    return window


def updating(policy: Any, window: Any, size: Size) -> Callable[[], None]:
    """An optimiser step on all rows; the learning rate is small enough to change nothing."""
    from apportion.grpo.loss import LossConfig
    from apportion.grpo.update import OptimConfig, accumulate_gradients, build_optimizer, optimizer_step

    optimizer, schedule = build_optimizer(policy, OptimConfig(lr=1e-9, minibatches=1), 1000)
    rows, loss = torch.arange(PROMPTS * GROUP), LossConfig()

    def update() -> None:
        accumulate_gradients(
            policy, window, rows, loss, micro_batch_rows=2 * GROUP, max_tokens=size.limit, temperature=1.0
        )
        optimizer_step(policy, optimizer, schedule, max_grad_norm=1.0, step=1)

    return update


# --- the others ------------------------------------------------------------------------------------------------------


def vllm_rollouts(size: Size) -> dict[str, Any]:
    """The same rollouts by vLLM, and how long it takes to give it the weights."""
    from apportion.grpo.engines import awake
    from apportion.grpo.engines.vllm_local import VLLM
    from apportion.grpo.sampling import RolloutConfig

    policy = policy_of(size)
    rollout = RolloutConfig(prompts_per_step=PROMPTS, group_size=GROUP, max_new_tokens=size.limit)
    engine = VLLM(gpu_memory_utilization=0.5).start(policy, rollout)
    began = time.perf_counter()
    with awake(engine, policy):
        synchronize()
        synced = time.perf_counter() - began
        return {**rollouts(engine, size)[0], "sync_seconds": synced}


def trl_steps(size: Size, steps: int = 3) -> dict[str, Any]:
    """Steps of TRL's trainer on the same prompts, its generation included; the first one is left out."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    taken: list[float] = []
    sampled: list[int] = []
    began = 0.0

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.append(sum(map(len, completion_ids)))
        return [float(row % 2) for row in range(len(completion_ids))]

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began
            synchronize()
            began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            taken.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2 * GROUP,
            gradient_accumulation_steps=PROMPTS // 2,
            num_generations=GROUP,
            max_completion_length=size.limit,
            max_steps=steps,
            learning_rate=1e-9,
            beta=0.0,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        texts = [" ".join(f"t{one}" for one in prompt) for prompt in prompts_of(size)]
        GRPOTrainer(
            model_of(size),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=word_tokenizer(size),
            callbacks=[Clock()],
        ).train()
    each, own = statistics.median(taken[1:]), statistics.mean(sampled[1:])
    return {
        "step_seconds": each,
        "tokens": own,
        "step_seconds_per_1000_tokens": 1000 * each / own,
        "peak_bytes": peak_memory(),
    }


def word_tokenizer(size: Size) -> Any:
    """A tokenizer whose words are ids: ``t17`` is 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"t{one}": one for one in range(size.vocabulary)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="t0", pad_token="t0", unk_token="t0", padding_side="left"
    )


CHILDREN = {"vllm": vllm_rollouts, "trl": trl_steps}


def in_child(what: str, names: Sequence[str], toy: bool, limit: float) -> dict[str, Any]:
    """``what`` at the sizes ``names`` in a process of its own; those that it had done when the time was over count."""
    if importlib.util.find_spec(what) is None:
        return {"skipped": f"{what} is not installed"}
    if what == "vllm" and not torch.cuda.is_available():
        return {"skipped": "vllm needs CUDA"}
    command = [sys.executable, __file__, "--child", what, "--sizes", *names, *(["--toy"] if toy else [])]
    lines, note = talk(command, limit)
    found: dict[str, Any] = {name: {"skipped": note} for name in names}
    for line in lines:
        if line.startswith(RESULT):
            found |= json.loads(line.removeprefix(RESULT))
    return found


def talk(command: Sequence[str], limit: float) -> tuple[list[str], str]:
    """What a command printed, and why there may be no more: after ``limit`` seconds it and its children end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=ROOT
    )
    try:
        out, _ = process.communicate(timeout=max(limit, 1))
        note = f"the process ended with {process.returncode}: {' | '.join(out.splitlines()[-3:])[-400:]}"
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        note = f"not done after {limit:.0f} s"
    return out.splitlines(), note


def child(what: str, sizes: Mapping[str, Size]) -> None:
    for name, size in sizes.items():
        try:
            found = CHILDREN[what](size)
        except Exception as error:  # the next size may do
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(RESULT + json.dumps({name: found}), flush=True)
        release()


def run_tests(limit: float) -> dict[str, Any]:
    """The tests marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--no-header", "tests/grpo/test_gpu.py"]
    lines, note = talk(command, limit)
    summary = next((line for line in reversed(lines) if " in " in line and line[:1].isdigit()), None)
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": summary or note, "failures": failures}


# --- the whole -------------------------------------------------------------------------------------------------------


def benchmark(sizes: Mapping[str, Size], *, toy: bool, limit: float) -> dict[str, Any]:
    """All parts, the most telling first."""
    budget = Budget(limit)
    about = describe_device()
    found: dict[str, Any] = {"device": about, "prompts": PROMPTS, "group": GROUP, "sizes": {}}
    for name, size in sizes.items():
        found["sizes"][name] = budget.run(2 if toy else 15, lambda one=size: measure(one, about["peak_flops"]))
    if not torch.cuda.is_available():
        found["tests"] = {"skipped": "needs CUDA"}
    else:
        found["tests"] = budget.run(15, lambda: run_tests(min(60, budget.left)))
    for what, share in (("vllm", 0.6), ("trl", 1.0)):
        found[what] = budget.run(10, lambda one=what, own=share: in_child(one, list(sizes), toy, own * budget.left - 2))
    found["seconds"] = round(limit - budget.left, 1)
    return found


def bars(found: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, list[float]]]]:
    """Titles, units and values by size of the three panels; NaN where nothing was measured."""
    names = list(found["sizes"])

    def of(part: Mapping[str, Any], *keys: str) -> float:
        value: Any = part
        for key in keys:
            value = value.get(key, {}) if isinstance(value, Mapping) else {}
        return float(value) if isinstance(value, int | float) else float("nan")

    def ours(*keys: str) -> list[float]:
        return [of(found["sizes"], name, *keys) for name in names]

    def theirs(who: str, key: str) -> list[float]:
        return [of(found[who], name, key) for name in names]

    yield (
        "Rollouts",
        "tokens a second",
        {"built in": ours("rollout", "tokens_per_second"), "vLLM": theirs("vllm", "tokens_per_second")},
    )
    key = "step_seconds_per_1000_tokens"
    yield "Whole step", "seconds for 1,000 sampled tokens", {"apportion": ours(key), "TRL": theirs("trl", key)}
    yield "Update", "model FLOP utilisation", {"apportion": ours("update", "utilisation")}


def draw(found: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    names = list(found["sizes"])
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for place, (title, unit, series) in enumerate(bars(found), start=1):
        axes = figure.add_subplot(1, 3, place)
        width = 0.8 / len(series)
        for index, (label, values) in enumerate(series.items()):
            where = [at + (index - (len(series) - 1) / 2) * width for at in range(len(names))]
            shown = axes.bar(where, [0 if value != value else value for value in values], width * 0.95, label=label)
            axes.bar_label(shown, ["-" if value != value else f"{value:.3g}" for value in values], fontsize=7)
        axes.set_xticks(range(len(names)), names)
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{found['device']['name']}, random weights, {PROMPTS} x {GROUP} answers", fontsize=10)
    figure.savefig(path, format="svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = TOY if options.toy else SIZES
    sizes = {name: known[name] for name in options.sizes or known}
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        if not options.toy:
            parser.error("there is no CUDA here; --toy runs on a CPU")
    if options.child is not None:
        child(options.child, sizes)
        return
    found = benchmark(sizes, toy=options.toy, limit=options.seconds or (25 if options.toy else 230))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draw(found, options.out / "gpu.svg")
    print(json.dumps(found, indent=2))
    print(options.out.resolve())


if __name__ == "__main__":
    main()
