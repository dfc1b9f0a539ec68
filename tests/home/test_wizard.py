"""The wizard: what it proposes, the files it leaves, and a session in a terminal on computers found in a network."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
import soundfile
import torch
import typer
from hosts import Hosts, fixtures
from hosts.fixtures import wait_for
from paths import ROOT
from processes import python
from speech_files import tone
from text_files import folder_of_texts, save_small

from exogym import LocalTrainer, load_model
from exogym.cli import app, main
from exogym.cli.asking import Asker
from exogym.cli.values import DATASETS
from exogym.core.record.history import History
from exogym.core.record.run_folder import read_status
from exogym.core.saving.export import save_model
from exogym.errors import ArgumentError
from exogym.home.commands import wizard as wizard_command
from exogym.home.whisper import WhisperModelWrapper
from exogym.home.whisper.weights import SMALL
from exogym.home.wizard import hand_over, make_session, propose
from exogym.machines.remote.profile import RunProfile, evaluations_of, load_profile
from exogym.machines.remote.results import FitResults
from exogym.models import MLP
from exogym.network import Network
from exogym.study.compare import forecast, measured_evaluation_s
from exogym.study.tasks import load_task
from exogym.testing import fingerprint

hosts = fixtures.hosts  # where pytest looks for it
COUNT = 2
STEPS, WHISPER_STEPS = 60, 30
PATIENCE_S = 600
ENTER, DOWN, BACK = "\r", "\x1b[B", "\x7f"
MODEL = "fit_1.model.safetensors"


def measured(bandwidth_bps: float, latency_s: float = 1e-4, nodes: int = 2) -> Network:
    """Return a network as measured, whose all-reduce takes as long as that of a link."""
    times = {size: latency_s + 8 * size / bandwidth_bps for size in (8, 1 << 12, 1 << 20, 1 << 24)}
    return Network.measured(all_reduce=times, num_nodes=nodes)


def measured_of(hosts: Hosts) -> dict[str, Any]:
    """Return what a file says that was measured of the hosts, by the names they have: den is the first."""
    known = measured(2e8).measurement
    assert known is not None
    return known.describe() | {"hosts": [host.address for host in hosts.machines[::-1]], "step_s": [0.05, 0.05]}


def measured_steps(bandwidth_bps: float) -> dict[str, Any]:
    """Return a measurement of two nodes with the time of a step."""
    known = measured(bandwidth_bps).measurement
    assert known is not None
    return known.describe() | {"step_s": [0.05, 0.05]}


def planned(network: Network, **more: Any) -> Any:
    given: dict[str, Any] = {"parameters": 1e6, "steps": 2000, "batch_size": 8, "step_s": [0.05, 0.05]}
    return propose(network=network, **given | more)


# What is proposed


def test_the_slower_the_network_the_rarer_nodes_meet() -> None:
    found = [planned(measured(bandwidth)) for bandwidth in (1e12, 2e8, 7e7, 1e6)]
    rows = [plan.advice.recommended for plan in found]
    sent = [row.tx_bytes_per_step for row in rows]
    assert found[0].strategy == "ddp" and sent == sorted(sent, reverse=True) and len(set(sent)) > 2
    assert [plan.strategy for plan in found] == [row.strategy for row in rows]


def test_the_estimate_is_steps_times_the_predicted_step_and_evaluations() -> None:
    plan = planned(measured(2e8), evaluations=11, evaluated=240)
    row = next(row for row in plan.advice.rows if row.strategy == plan.strategy)
    evaluations = 11 * 240 / 8 * 0.05 / 3
    assert plan.seconds == pytest.approx(2000 * row.seconds_per_step + evaluations)
    assert plan.alone_s == pytest.approx(2000 * 2 * 0.05 + evaluations)
    assert plan.speedup == row.speedup and 1 < plan.speedup < 2


def test_a_strategy_of_ones_own_is_compared_and_taken() -> None:
    plan = planned(measured(2e8), strategy="diloco:H=7")
    assert plan.strategy == "diloco:H=7" and "because you chose it" in str(plan)
    with pytest.raises(ArgumentError, match="dilcoo"):
        planned(measured(2e8), strategy="dilcoo")


def test_no_period_is_longer_than_a_quarter_of_the_run() -> None:
    for steps, longest in ((2000, 300), (120, 30), (12, 3), (1, 1)):
        names = [row.strategy for row in planned(measured(1e5), steps=steps).advice.rows]
        assert max(int(found[1]) for name in names if (found := re.search(r"H=(\d+)", name))) == longest


def test_what_else_the_measurement_says() -> None:
    assert planned(measured(2e8)).hints == []
    (hint,) = planned(measured(2e8), step_s=[0.05, 0.08]).hints
    assert "1.6 times as long" in hint and "--balance steps" in hint
    (hint,) = planned(measured(1e5), steps=40).hints
    assert "alone would be faster" in hint
    with pytest.raises(ArgumentError, match="no measured step"):
        propose(network=Network("1Gbps"), parameters=1e6, steps=10, batch_size=8)


def test_an_evaluation_takes_as_long_as_it_was_measured() -> None:
    """On the first host, whose process evaluates; a file without it is said to lack it."""
    known = measured(2e8).measurement
    assert known is not None
    network = Network.of(known.describe() | {"step_s": [0.05, 0.04], "evaluation_s": [3.0, 2.0]})
    without, plan = (planned(network, step_s=None, evaluations=n, evaluated=240) for n in (0, 11))
    assert plan.seconds - without.seconds == pytest.approx(11 * 3.0)
    assert plan.alone_s - without.alone_s == pytest.approx(11 * 2.0)
    assert not any("evaluation" in hint for hint in plan.hints)
    (hint,) = planned(measured(2e8), evaluations=11, evaluated=240).hints
    assert "evaluations were not measured" in hint


@pytest.mark.parametrize("steps", [3, 19, 40])
def test_a_run_is_evaluated_as_often_as_the_estimate_counts(steps: int) -> None:
    profile = RunProfile("digits", strategy="ddp", steps=steps)
    task = profile.load()
    trainer = LocalTrainer(task.make_model(), task.train, task.val)
    trainer.fit(profile.make_strategy(task), **profile.fit_options(task) | {"num_nodes": 1})
    found = [row["step"] for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    assert len(found) == evaluations_of(steps) and found[-1] == steps


@pytest.mark.parametrize(("each_s", "counted", "runs"), [(0.01, 8 + 60, 2), (0.1, 8, 1)])
def test_an_evaluation_is_timed_as_a_run_does_it(
    monkeypatch: pytest.MonkeyPatch, each_s: float, counted: int, runs: int
) -> None:
    """Of sixty examples, on a clock that only evaluation moves: a short one wholly, a long one by eight of them."""
    clock, timed = [0.0], [0]

    class Slow(MLP):
        def forward(self, batch: Any) -> Any:
            if not self.training:
                clock[0] += each_s * len(batch[1])
                timed[0] += len(batch[1])
            return super().forward(batch)

    task = load_task("digits")
    val = torch.utils.data.Subset(task.val, range(60))
    task = dataclasses.replace(task, val=val, build=lambda: Slow([64, 4, 10]))
    monkeypatch.setattr(forecast, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    assert measured_evaluation_s(task) == pytest.approx(60 * each_s)
    # a run evaluates at its start and its end, too, and first finds out how many examples fit by a batch of four
    assert timed[0] == 3 * counted + 4 * runs


# The files


def test_the_files_of_a_session_repeat_it(tmp_path: Path) -> None:
    fields = {"task": "digits", "strategy": "diloco:H=20", "steps": 40, "batch_size": 4, "lr": None, "seed": 3}
    session = make_session(tmp_path / "run", fields, {"master": "10.0.0.1", "workers": ["10.0.0.2"]}, sync=True)
    assert session.command == "exogym distributed-train wizard --sync"
    profile = load_profile(tmp_path / "run" / "config.ini", "wizard")
    assert profile == session.profile and profile.steps == 40 and profile.seed == 3 and profile.lr is None
    assert profile.hosts_config == str(tmp_path / "run" / "distributed_hosts.json")
    with pytest.raises(ArgumentError, match=r"already has a config\.ini"):
        make_session(tmp_path / "run", fields, {"master": "10.0.0.1"}, sync=True)
    with pytest.raises(ArgumentError, match="unknown"):
        make_session(tmp_path / "other", fields | {"unknown": 1}, {"master": "10.0.0.1"}, sync=True)
    assert not (tmp_path / "other" / "config.ini").exists()


# What a trained model leaves


def trained_speech(folder: Path) -> Path:
    """Write the model file of a run of the task "whisper" with the small model; return it."""
    torch.manual_seed(0)
    return save_model(WhisperModelWrapper.from_weights(SMALL, window_s=1.0, lora_rank=2), folder / MODEL)


@pytest.mark.slow
def test_the_lines_that_use_a_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are printed: of speech by transformers, of another task by this package."""
    monkeypatch.chdir(tmp_path)
    soundfile.write("recording.wav", tone(1.5, 8_000), 8_000)
    options = {"weights": SMALL}
    told = hand_over("whisper", None, options, trained_speech(tmp_path))
    lines = [line.strip() for line in told if line.startswith("    ")]
    assert len(lines) == 3 and "pipeline" in lines[1]
    lines[2] = lines[2].replace("[0])['text']", "[0], generate_kwargs={'max_new_tokens': 3})['text']")
    exec("\n".join(lines), {})
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }


def test_a_trained_language_model_is_handed_over(tmp_path: Path) -> None:
    """As a model and an adapter; the printed lines run."""
    from exogym.home.language import LanguageModelWrapper

    texts, weights = folder_of_texts(tmp_path / "texts"), save_small(tmp_path / "base")
    options = {"weights": str(weights), "block_size": 32, "lora_rank": 2}
    model = LanguageModelWrapper.from_weights(weights, lora_rank=2)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=1.0)
    told = hand_over("language", str(texts), options, save_model(model, tmp_path / MODEL))
    lines = [line.strip() for line in told if line.startswith("    ")]
    assert len(lines) == 3 and "text-generation" in lines[1]
    exec("\n".join(lines).replace("max_new_tokens=40", "max_new_tokens=3"), {})
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json"}
    known = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= known
    del options["lora_rank"]
    whole = save_model(LanguageModelWrapper.from_weights(weights), tmp_path / "whole" / MODEL)
    told = hand_over("language", str(texts), options | {"lora_rank": None}, whole)
    assert not any("adapter alone" in line for line in told) and (tmp_path / "whole" / "model").is_dir()


def test_the_lines_that_use_another_model_run(tmp_path: Path) -> None:
    model = load_task("digits", hidden=5).make_model(3)
    told = hand_over("digits", None, {"hidden": 5}, save_model(model, tmp_path / MODEL))
    found: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in told if line.startswith("    ")), found)
    assert fingerprint(found["model"]) == fingerprint(model)


def test_the_result_says_how_much_was_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History()
    history.add_evaluation(0, 0, {"val_loss": 2.0, "val_wer": 0.5})
    history.add_evaluation(9, 0, {"val_loss": 1.0, "val_wer": 0.25, "wall_s": planned(measured(2e8)).seconds / 2})
    monkeypatch.setattr(wizard_command, "train", lambda *given: FitResults(history))
    fields = {"task": "digits", "strategy": "ddp"}
    session = make_session(tmp_path / "run", fields, {"master": "10.0.0.1", "workers": ["10.0.0.2"]}, sync=True)
    task = dataclasses.replace(load_task("digits"), evaluates="2 of the 5 held-out clips")
    wizard_command.carry_out(session, planned(measured(2e8)), task)
    said = capsys.readouterr().out
    assert "validation word error rate: 0.5000 before, 0.2500 after, on 2 of the 5 held-out clips" in said
    assert "perplexity" not in said and re.search(
        r"training took .*, 50 % less than the estimated .*; .* including start", said
    )
    history.add_evaluation(10, 0, {"val_loss": 800.0})
    wizard_command.carry_out(session, planned(measured(2e8)), dataclasses.replace(task, perplexity=True))
    said = capsys.readouterr().out
    assert "validation perplexity: 7.389 before, inf after" in said and "2.0000 before, 800.0000" in said


def test_weights_of_this_computer_are_copied_with_the_data(tmp_path: Path) -> None:
    """A folder or a file."""
    hosts_file = tmp_path / "hosts.json"
    hosts_file.write_text('{"master": "10.0.0.1", "workers": ["10.0.0.2"]}')
    texts, model = folder_of_texts(tmp_path / "weights"), tmp_path / "own" / "model.gguf"
    model.parent.mkdir()
    model.write_bytes(b"numbers")
    for weights, there in ((model, "weights/model.gguf"), (model.parent, "weights/own")):
        options = f"block_size=32, weights={weights}"
        own = wizard_command.weights_of(options)
        place = wizard_command.RunPlace.of(tmp_path / f"run-{weights.name}", None, hosts_file, texts, own)
        place.make()
        assert place.options_there(options) == f"block_size=32, weights={there}" and (place.folder / there).exists()
        assert place.data_there == "data/weights" and (place.folder / place.data_there / "00.txt").exists()
    for none in (None, "lora_rank=4", "weights=small-random"):
        place = wizard_command.RunPlace.of(tmp_path / "b", None, hosts_file, None, wizard_command.weights_of(none))
        assert place.weights is None and place.options_there(none) == none


# Without a terminal


def test_without_a_terminal_each_question_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    asker = Asker()
    assert not asker.can_ask and not asker.sure("Start?")
    assert asker.text("--steps", "How many?", int, "7") == 7 and asker.choose("--x", "?", {"a": "A"}, "a") == "a"
    assert "--steps 7" in capsys.readouterr().err
    for ask in (
        lambda: asker.choose("--task", "What?", {"a": "A"}),
        lambda: asker.several("--computers", "Which?", {"a": "A"}),
        lambda: asker.text("--code", "Which?", str),
    ):
        with pytest.raises(ArgumentError, match=r"Without a terminal, pass --(task|computers|code)"):
            ask()


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "pass --task"),
        (["--task", "digit"], "did you mean 'digits'"),
        (["--task", "digits", "--hosts", "one.json"], "only one computer"),
        (["--task", "digits", "--hosts", "torn.json"], "invalid JSON"),
        (["--task", "digits", "--hosts", "two.json", "--not-here"], "--here is for pairing, but --hosts='two.json'"),
        (["--task", "digits", "--hosts", "two.json", "--code", "a=1"], "--code is for pairing"),
        (["--task", "digits", "--hosts", "two.json", "--at", "10.0.0.9"], "--at is for pairing"),
        (["--task", "digits", "--folder", "full"], "is not empty"),
        (["--task", "digits", "--hosts", "two.json", "--strategy", "dilocoo"], "did you mean 'diloco'"),
        (["--task", "digits", "--hosts", "two.json", "--balance", "evenly"], "balance='evenly'"),
        (["--task", "whisper", "--data", "one.json"], "pass the folder"),
        (["--task", "digits", "--computers", "a", "--code", "12"], "must be NAME=CODE"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(
    words: list[str], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.json").write_text('{"master": "10.0.0.1"}')
    Path("two.json").write_text('{"master": "10.0.0.1", "workers": ["10.0.0.2"]}')
    Path("torn.json").write_text("{")
    Path("full").mkdir()
    Path("full/file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert main(["wizard", "--steps", "10", *words]) == 2
    assert wrong in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_done_without_a_yes(hosts: Hosts, tmp_path: Path) -> None:
    """Neither before anything is measured, nor with what was measured before; the hosts are only looked at."""
    hosts.file(tmp_path / "hosts.json")
    there = tmp_path / "there"
    words = ["-m", "exogym", "wizard", "--task", "digits", "--hosts", "hosts.json", "--steps", str(STEPS)]
    words += ["--path-on-hosts", str(there)]
    with hosts.controller.inside():
        done = python(*words, cwd=tmp_path)
    assert done.returncode == 0 and "all checks passed" in done.stdout and "nothing was done" in done.stdout, (
        done.stderr
    )
    fields = measured_of(hosts)
    (tmp_path / "measured.json").write_text(json.dumps(fields | {"hosts": fields["hosts"][::-1]}))
    with hosts.controller.inside():
        done = python(*words, "--measured", "measured.json", cwd=tmp_path)
    assert done.returncode == 0 and "times as fast" in done.stdout and "nothing was trained" in done.stdout, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.json", "measured.json"]


def test_what_is_not_well_comes_with_help(hosts: Hosts, tmp_path: Path) -> None:
    hosts.file(tmp_path / "hosts.json", python_env="/nowhere/python")
    with hosts.controller.inside():
        done = python(
            "-m", "exogym", "wizard", "--task", "digits", "--hosts", "hosts.json", "--steps", "9", "--yes", cwd=tmp_path
        )  # fmt: skip
    assert done.returncode == 1 and "to a Python 3.11 or later" in done.stdout, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.json"]


# In a terminal


class Terminal:
    """The wizard in a terminal, driven as a person would; `text` is all that was seen."""

    def __init__(self, hosts: Hosts, folder: Path, *words: str):
        wide = {"LINES": "50", "COLUMNS": "130"}  # what is said is broken there, whatever pytest was started in
        environment = os.environ | wide | {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "HOME": str(folder)}
        line = hosts.controller.words([sys.executable, "-m", "exogym", "wizard", *words])
        self.process = pexpect.spawn(
            line[0], line[1:], cwd=str(folder), env=environment, encoding="utf-8", timeout=PATIENCE_S,
            dimensions=(50, 130),
        )  # fmt: skip
        self.seen: list[str] = []

    def until(self, text: str) -> None:
        """Wait for a text on the screen."""
        self.process.expect_exact(text)
        self.seen += [self.process.before, self.process.after]

    def answer(self, question: str, keys: str) -> None:
        self.until(question)
        self.process.send(keys)

    def end(self) -> int:
        self.process.expect(pexpect.EOF)
        self.seen.append(self.process.before)
        self.process.close()
        (Path(os.environ.get("EXOGYM_TRANSCRIPT", "/dev/null"))).write_text(self.text)
        status: int = self.process.exitstatus
        return status

    @property
    def text(self) -> str:
        return "".join(self.seen)


@pytest.fixture
def agents(hosts: Hosts) -> Iterator[list[str]]:
    """Both hosts wait to be found, and let nobody in; the codes that they show."""
    started = []
    for name, host in zip(("studio", "den"), hosts.machines, strict=True):
        host.authorized_keys.write_text("")
        words = [sys.executable, "-m", "exogym", "agent", "--name", name, "--authorized-keys", host.authorized_keys]
        started.append(host.start(words, stdout=subprocess.PIPE))
    try:
        codes = []
        for process in started:
            said = [next(process.stdout) for _ in range(2)]
            codes.append(said[0].removeprefix("code for pairing: ").strip())
        yield codes
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def ssh_config(folder: Path) -> Path:
    config = folder / "ssh_config"
    config.write_text(f"UserKnownHostsFile {folder / 'known'}\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n")
    return config


def talk(terminal: Terminal, codes: list[str], task: int, steps: int, measures: bool) -> None:
    """Answer as a person would, who first types a wrong code and looks at what else there is to choose.

    Args:
        task: its place in the list.
        measures: whether nothing was measured before.
    """
    terminal.answer("What do you want to train?", DOWN * task + ENTER)
    terminal.answer("Found 2. Which computers do you want to use?", ENTER)
    terminal.answer("Code that den at 10.77.0.11 shows:", ("000-001" if codes[1] != "000-001" else "000-002") + ENTER)
    terminal.until("the code is wrong")
    terminal.answer("Code that den at 10.77.0.11 shows:", codes[1] + ENTER)
    terminal.until("paired with den")
    terminal.answer("Code that studio at 10.77.0.10 shows:", codes[0] + ENTER)
    terminal.until("paired with studio")
    terminal.answer("Train on this computer too?", "n")
    terminal.answer("How many steps on each computer?", BACK * 6 + str(steps) + ENTER)
    terminal.until("all checks passed")
    if measures:
        terminal.answer("Measure now?", ENTER)
    terminal.until("times as fast")
    terminal.answer("Start training?", DOWN + ENTER)
    for question in (
        "Which strategy?",
        "How many steps?",
        "How many examples per node and batch?",
        "How should the load",
    ):
        terminal.answer(question, ENTER)
    terminal.answer("Start training?", ENTER)
    terminal.until("to repeat the run, use this command in that folder: exogym distributed-train wizard --sync")


def simulated(session: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the fingerprint of the same run in simulation."""
    monkeypatch.chdir(session)
    profile = load_profile("config.ini", "wizard")
    task = profile.load()
    model = task.make_model(profile.seed)
    options = profile.fit_options(task) | {"num_nodes": 2}
    LocalTrainer(model, task.train, task.val).fit(profile.make_strategy(task), **options)
    return fingerprint(model)


def model_of_run(session: Path, run: Path) -> str:
    """Return the fingerprint of the model that a run of the wizard has left."""
    return fingerprint(load_model(load_profile(session / "config.ini", "wizard").load().make_model(), run / MODEL))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", "whisper", "language"])
def test_from_computers_in_a_network_to_a_trained_model(
    hosts: Hosts, agents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Found, paired by codes, looked at, measured, agreed to, trained; and in simulation the same bits.

    Whisper learns a folder of clips that the hosts have not: fewer words of those held out are wrong afterwards. A
    language model, which the hosts have not either, learns a folder of texts: the perplexity of those held out falls.
    """
    words = ["--ssh-config", str(ssh_config(tmp_path)), "--path-on-hosts", str(tmp_path / "there"), "--key", "own/key"]
    if task == "whisper":
        write_clips(tmp_path / "speech", 48, 12)
        words += ["--data", "speech"]
    elif task == "language":
        folder_of_texts(tmp_path / "texts")
        save_small(tmp_path / "base")
        words += ["--data", "texts", "--task-options", "weights=base, block_size=32, lora_rank=4", "--lr", "0.01"]
    else:
        (tmp_path / "measured.json").write_text(json.dumps(measured_of(hosts)))
        words += ["--measured", "measured.json"]
    terminal = Terminal(hosts, tmp_path, *words)
    steps = WHISPER_STEPS if task == "whisper" else STEPS
    talk(terminal, agents, DATASETS.index(task), steps, measures=task != "digits")
    assert terminal.end() == 0, terminal.text
    assert re.search(r"training took .*, \d+ % (more|less) than the estimated ", terminal.text), terminal.text
    name = {"digits": "loss", "whisper": "word error rate", "language": "perplexity"}[task]
    found = re.search(rf"validation {name}: (\d+\.\d+) before, (\d+\.\d+) after", terminal.text)
    assert found and float(found[2]) < float(found[1]), terminal.text
    session = tmp_path / f"exogym-{task}"
    assert {path.name for path in session.iterdir()} >= {"distributed_hosts.json", "config.ini", "measured.json"}
    (run,) = (session / "runs").iterdir()
    if task == "whisper":
        assert (run / "model" / "preprocessor_config.json").exists()
    if task == "language":
        assert (run / "model" / "tokenizer.json").exists() and (run / "adapter" / "adapter_config.json").exists()
        assert (session / "weights" / "base" / "config.json").exists()
    again = simulated(session, monkeypatch)
    assert model_of_run(session, run) == again


def write_clips(folder: Path, train: int, held_out: int) -> None:
    """Write lines that espeak-ng reads aloud, and a manifest."""
    import soundfile

    from exogym.home.speech import lines_of_shakespeare, spoken

    folder.mkdir()
    learnt, kept = lines_of_shakespeare(train, held_out)
    rows = ["file,split,text"]
    for number, row in enumerate(spoken([*learnt, *kept])):
        audio: Any = row["audio"]
        soundfile.write(folder / f"{number}.wav", audio["array"], audio["sampling_rate"])
        rows.append(f'{number}.wav,{"train" if number < train else "validation"},"{row["text"]}"')
    (folder / "manifest.csv").write_text("\n".join(rows))


@pytest.mark.slow
def test_the_command_repeats_the_run(hosts: Hosts, tmp_path: Path) -> None:
    """What the wizard says repeats the run does: bit for bit, without the wizard, and without a terminal."""
    hosts.file(tmp_path / "hosts.json")
    for host in hosts.machines:
        host.authorized_keys.write_text(hosts.key.with_suffix(".pub").read_text())
    words = ["-m", "exogym", "wizard", "--task", "digits", "--hosts", "hosts.json", "--steps", str(STEPS), "--yes"]
    words += ["--path-on-hosts", str(tmp_path / "there"), "--strategy", "diloco:H=7", "--folder", "session"]
    session = tmp_path / "session"
    with hosts.controller.inside():
        done = python(*words, cwd=tmp_path)
        assert done.returncode == 0 and "training took" in done.stdout, done.stdout + done.stderr
        done = python("-m", "exogym", "distributed-train", "wizard", "--sync", cwd=session)
        assert done.returncode == 0, done.stdout + done.stderr
    first, again = (model_of_run(session, run) for run in (session / "runs").iterdir())
    assert first == again


@pytest.mark.slow
def test_the_command_that_advise_names_trains_on_the_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """`exogym advise --hosts` measures; the command in its first line takes this measurement and trains."""
    hosts.file(tmp_path / "hosts.json")
    for host in hosts.machines:
        host.authorized_keys.write_text(hosts.key.with_suffix(".pub").read_text())
    words = ["-m", "exogym", "advise", "--dataset", "digits", "--hosts", "hosts.json", "--steps", str(STEPS)]
    with hosts.controller.inside():
        told = python(*words, "--strategies", "diloco:H=7", cwd=tmp_path)
        assert told.returncode == 0, told.stdout + told.stderr
        run, *_ = told.stdout.splitlines()
        assert run.startswith("run: exogym wizard --task digits --hosts hosts.json --strategy diloco:H=7"), run
        more = ["--yes", "--path-on-hosts", str(tmp_path / "there"), "--folder", "session"]
        done = python("-m", *shlex.split(run.removeprefix("run: ")), *more, cwd=tmp_path)
    assert done.returncode == 0 and "training took" in done.stdout, done.stdout + done.stderr
    steps = shlex.split(run)[shlex.split(run).index("--steps") + 1]  # what DDP's STEPS are for this strategy
    assert f"strategy diloco:H=7, {steps} steps" in done.stdout and "measuring" not in done.stdout


@pytest.mark.slow
def test_a_killed_host_comes_back_into_a_run_of_the_wizard(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model, without a terminal: from the last checkpoint on, to the bits of the simulation."""
    hosts.file(tmp_path / "hosts.json")
    for host in hosts.machines:
        host.authorized_keys.write_text(hosts.key.with_suffix(".pub").read_text())
    folder_of_texts(tmp_path / "texts")
    save_small(tmp_path / "base")
    words = ["-m", "exogym", "wizard", "--task", "language", "--data", "texts", "--hosts", "hosts.json", "--yes"]
    words += ["--task-options", "weights=base, block_size=32, lora_rank=4", "--lr", "0.01", "--steps", "400"]
    words += ["--path-on-hosts", str(tmp_path / "there"), "--strategy", "diloco:H=8", "--folder", "session"]
    words += ["--save-dir", "checkpoints"]
    with open(tmp_path / "said", "w") as file:
        run = hosts.controller.start([sys.executable, *words], cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    runs = tmp_path / "session" / "runs"
    wait_for(lambda: any(step_of(path) > 100 for path in runs.glob("*/")), run)
    (worker,) = [pid for pid, line in hosts[1].processes().items() if "runner.py" in line]
    os.kill(worker, signal.SIGKILL)
    assert run.wait(300) == 0, (tmp_path / "said").read_text()
    told = (tmp_path / "said").read_text()
    found = re.search(r"validation perplexity: (\d+\.\d+) before, (\d+\.\d+) after", told)
    assert found and float(found[2]) < 0.7 * float(found[1]), told
    (folder,) = runs.iterdir()
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds.count("start") > 1 or "restart" in " ".join(kinds), kinds  # the control: it was interrupted
    again = simulated(tmp_path / "session", monkeypatch)
    assert model_of_run(tmp_path / "session", folder) == again
    assert hosts.left_over() == {}


def step_of(folder: Path) -> int:
    status = read_status(folder) if (folder / "status.json").exists() else {}
    return int(status.get("step", 0))


def test_the_page_names_options_that_are_there() -> None:
    commands: Any = typer.main.get_command(app)
    known = {name for command in commands.commands.values() for option in command.params for name in option.opts}
    text = (ROOT / "docs" / "wizard.md").read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known | {"--not-here", "--help"}
