"""Laws of the warm start: the same weights for the same seed, made once, and never from a damaged file."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from apportion.experiments import warmstart
from apportion.experiments.policies import TinyPolicy
from apportion.experiments.tasks.chain import ChainTask
from apportion.experiments.warmstart import WarmStart, is_cached, warm_start
from apportion.grpo.seeds import named_generator
from apportion.verifiers import InputError

SOURCE = TinyPolicy(hidden_size=16, layers=1, heads=2, intermediate_size=16)
TASK = ChainTask(min_steps=1, max_steps=2)
START = WarmStart(steps=3, batch_size=6, micro_batch_size=6, warmup=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warm_start"


def weights(start=START, source=SOURCE, task=TASK):
    """Start a fresh policy; its weights in one vector, and whether they came from the cache."""
    policy = source.build()
    cached = warm_start(policy, source.key, task, start)
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()]), cached


def test_the_weights_follow_from_the_seed(cache):
    first, _ = weights()
    for folder in cache.iterdir():  # forget them
        (folder / "key.json").unlink()
    again, cached = weights()
    assert not cached
    assert torch.equal(first, again)
    assert not torch.equal(first, weights(dataclasses.replace(START, seed=1))[0])


def test_the_second_start_loads_what_the_first_made(monkeypatch):
    first, cached = weights()
    assert not cached
    monkeypatch.setattr(warmstart, "supervise", lambda *a, **k: pytest.fail("trained again"))
    second, cached = weights()
    assert cached
    assert torch.equal(first, second)
    assert is_cached(SOURCE.key, TASK, START)


def test_it_is_adamw_on_the_mean_negative_log_likelihood_of_the_demonstrated_tokens():
    """One step by hand: the loss, and the step of size lr / (warm-up) that Adam takes first."""
    start = WarmStart(steps=1, batch_size=5, micro_batch_size=5, lr=1e-3, warmup=4)
    policy, told = SOURCE.build(), []
    warm_start(policy, SOURCE.key, TASK, start, progress=lambda step, loss: told.append((step, loss)))
    fresh = SOURCE.build()
    total, tokens = torch.zeros(()), 0
    for prompt, completion in TASK.demonstrations(5, named_generator(0, "demonstrations")):
        ids = fresh.encode(prompt)
        answer = [*fresh.tokenizer(completion, add_special_tokens=False)["input_ids"], fresh.eos_ids[0]]
        logits = fresh.model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
        total = total - logits.log_softmax(-1)[range(len(answer)), answer].sum()
        tokens += len(answer)
    (total / tokens).backward()
    assert told == [(1, pytest.approx((total / tokens).item(), rel=1e-5))]
    torch.nn.utils.clip_grad_norm_(fresh.model.parameters(), 1.0)
    for before, after in zip(fresh.model.parameters(), policy.model.parameters()):
        assert before.grad is not None
        clear = before.grad.abs() > 1e-5  # Adam's first step is the sign of the gradient
        assert torch.allclose((after - before)[clear], -1e-3 / 4 * before.grad.sign()[clear], atol=1e-6)


def test_micro_batches_change_nothing():
    whole, _ = weights()
    parts, cached = weights(dataclasses.replace(START, micro_batch_size=2))
    assert not cached
    assert torch.allclose(whole, parts, atol=2e-5)


def test_the_learning_rate_rises_then_falls_to_zero():
    start = WarmStart(steps=14, warmup=4)
    rates = [warmstart._rate(step, start) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.5)
    assert rates[13] == pytest.approx(0.1)


def test_what_decides_the_weights_decides_the_key():
    weights()
    assert is_cached(SOURCE.key, TASK, START)
    for field in dataclasses.fields(WarmStart):
        changed = dataclasses.replace(START, **{field.name: getattr(START, field.name) + 1})
        assert not is_cached(SOURCE.key, TASK, changed), field.name
    for options in ({"min_steps": 2}, {"flaw_rate": 0.1}, {"flawed_facts": 0.9}, {"teacher_seed": 1}):
        assert not is_cached(SOURCE.key, dataclasses.replace(TASK, **options), START), options
    for options in ({"hidden_size": 20}, {"seed": 1}, {"layers": 2}, {"precision": "bf16"}, {"max_positions": 99}):
        other = TinyPolicy(**{"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16, **options})
        assert not is_cached(other.key, TASK, START), options
    assert is_cached(SOURCE.key, dataclasses.replace(TASK, num_held_out=7, num_retention=3), START)


def test_another_task_class_or_another_generator_is_another_key(monkeypatch):
    class Subclass(ChainTask):
        pass

    class Changed(ChainTask):
        def demonstrations(self, count, rng):
            return super().demonstrations(count, rng)[::-1]

    Changed.__qualname__ = ChainTask.__qualname__
    weights()
    options = {"min_steps": 1, "max_steps": 2}
    assert not is_cached(SOURCE.key, Subclass(**options), START)
    assert not is_cached(SOURCE.key, Changed(**options), START)


DAMAGES = {
    "cut short": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-9]
    ),
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "garbage": lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 4000),
    "one bit": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "gone": lambda folder: (folder / "model.safetensors").unlink(),
    "note gone": lambda folder: (folder / "key.json").unlink(),
    "note cut": lambda folder: (folder / "key.json").write_text("{"),
    "note of another kind": lambda folder: (folder / "key.json").write_text("[]"),
}


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_made_anew(kind, cache):
    first, _ = weights()
    (folder,) = cache.iterdir()
    DAMAGES[kind](folder)
    again, cached = weights()
    assert not cached
    assert torch.equal(first, again)
    assert weights()[1]
    assert sorted(path.name for path in folder.iterdir()) == ["key.json", "lock", "model.safetensors"]


def test_two_at_once_do_the_work_once(monkeypatch):
    trained, second_begins = [], threading.Event()
    real = warmstart.supervise

    def supervise(*arguments, **options):
        trained.append(threading.current_thread().name)
        assert second_begins.wait(30)
        real(*arguments, **options)

    monkeypatch.setattr(warmstart, "supervise", supervise)
    results = {}

    def start(name):
        policy = SOURCE.build()
        if trained:
            second_begins.set()
        results[name] = (warm_start(policy, SOURCE.key, TASK, START), next(policy.model.parameters()).sum().item())

    first = threading.Thread(target=start, args=("first",))
    first.start()
    while not trained and first.is_alive():
        first.join(0.01)
    second = threading.Thread(target=start, args=("second",))
    second.start()
    first.join(60)
    second.join(60)
    assert len(trained) == 1
    assert (results["first"][0], results["second"][0]) == (False, True)
    assert results["first"][1] == results["second"][1]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cache folder .*cannot be written \(Not a directory\); set APPORTION_CACHE"):
        weights()


def test_a_cache_that_can_only_be_read_is_read(cache):
    first, _ = weights()
    (folder,) = cache.iterdir()
    (folder / "lock").unlink()
    (folder / "lock").mkdir()  # to open it is an error, as in a read-only folder
    again, cached = weights()
    assert cached
    assert torch.equal(first, again)


def test_a_full_disk_is_one_line(monkeypatch):
    from safetensors import SafetensorError

    def full(*arguments):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_model", full)
    with pytest.raises(InputError, match=r"cannot be written \(.*No space left on device\); set APPORTION_CACHE"):
        weights()


def test_a_start_that_diverges_is_refused_and_not_kept():
    start = dataclasses.replace(START, steps=8, lr=1e30, warmup=0)
    with pytest.raises(InputError, match=r"warm start: the loss is \S+ at step \d; lower warm_start\.lr=1e\+30"):
        weights(start)
    assert not is_cached(SOURCE.key, TASK, start)


def test_no_steps_leave_the_policy_as_it_is(cache):
    policy = SOURCE.build()
    before = [p.clone() for p in policy.model.parameters()]
    assert warm_start(policy, SOURCE.key, object(), WarmStart(steps=0))
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters()))
    assert not cache.exists()


def test_a_task_without_demonstrations_is_refused():
    with pytest.raises(InputError, match=r"warm_start\.steps=3: object has no demonstrations; set it to 0"):
        weights(task=object())


def test_a_demonstration_with_an_unknown_symbol_is_refused():
    class Odd(ChainTask):
        def demonstrations(self, count, rng):
            return [("7+9=?", "[T]seven\n[/T]")] * count

    with pytest.raises(InputError, match="does not know every symbol of the demonstration"):
        weights(task=Odd())


@pytest.mark.parametrize(
    "options", [{"steps": -1}, {"batch_size": 0}, {"micro_batch_size": 0}, {"warmup": -1}, {"lr": 0}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InputError, match=rf"warm_start\.{next(iter(options))}="):
        WarmStart(**options)


def test_the_cache_lies_where_it_is_told_to(monkeypatch, tmp_path):
    monkeypatch.setenv("APPORTION_CACHE", "~/here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert warmstart.cache_folder() == tmp_path / "here"
    monkeypatch.delenv("APPORTION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert warmstart.cache_folder() == tmp_path / "xdg" / "apportion"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert warmstart.cache_folder() == tmp_path / ".cache" / "apportion"
