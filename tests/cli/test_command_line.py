"""Help, version, mistakes and the models commands: what is printed where, and the exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import headway as hw
from headway.cli.terminal import render
from headway.models.hub import store
from support.forked import forked
from support.hf import save_hf
from support.hf_families import family_model

Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("run", "chat", "models", "doctor", "--version")),
        (("--help",), ("run", "chat", "models", "doctor", "--version")),
        (
            ("run", "--help"),
            (
                "--model",
                "--dtype",
                "--device",
                "--threads",
                "--memory-fraction",
                "--json",
                "--raw",
                "--logprobs",
                "--stop",
            ),
        ),
        (("chat", "--help"), ("--model", "--system", "--temperature", "--seed", "--json")),
        (("models", "--help"), ("list", "pull", "show", "rm")),
        (("help",), ("run", "chat", "models", "doctor", "--version")),
        (("help", "run"), ("--model", "--quiet")),
        (("doctor", "-h"), ("--check", "--context", "--json")),
    ],
)
def test_help_names_what_there_is(headway: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = headway(*arguments, env={"COLUMNS": "120"})
    assert done.returncode == 0
    assert done.stderr == ""
    assert [word for word in words if word not in done.stdout] == []


@pytest.mark.parametrize("command", ["run", "lab", "models list"])
def test_flags_show_no_type_in_the_help(headway: Run, command: str) -> None:
    shown = headway(*command.split(), "--help", env={"COLUMNS": "120"}).stdout
    assert "<bool>" not in shown
    assert "--help" in shown


def test_models_alone_lists_them(headway: Run) -> None:
    assert headway("models").stdout == headway("models", "list").stdout
    assert "smollm2" in headway("models").stdout
    assert any(model["name"] == "smollm2" for model in json.loads(headway("models", "--json").stdout))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("ls",), "headway models list"),
        (("pull", "smollm2"), "headway models pull"),
        (("srve",), "headway serve"),
        (("models", "remove"), "headway models rm"),
        (("models", "lst"), "headway models list"),
    ],
)
def test_a_near_name_gets_a_hint(headway: Run, arguments: tuple[str, ...], hint: str) -> None:
    done = headway(*arguments)
    assert done.returncode == 2
    assert f"you may mean `{hint}`" in done.stderr


def test_the_shell_completes_commands(headway: Run) -> None:
    asked = {"_HEADWAY_COMPLETE": "complete_bash", "COMP_WORDS": "headway mo", "COMP_CWORD": "1"}
    assert headway(env=asked).stdout.split() == ["models"]
    assert "--install-completion" in headway("--help").stdout


def test_a_quiet_command_prints_its_answer_alone(headway: Run) -> None:
    done = headway("run", "--raw", "One", "-q", "--max-tokens", "2", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_long_start_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "LOADING_SECONDS", 0.0)
    with render.loading() as progress:
        assert progress is not None
        progress(3, 30)
    assert capsys.readouterr().err == "loading: 3 of 30 layers\n"


def test_help_loads_no_torch() -> None:
    code = "import sys, headway.cli.main; print({'torch', 'huggingface_hub', 'tokenizers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_version(headway: Run) -> None:
    assert re.fullmatch(r"headway \S+.*\n", headway("--version").stdout)


MISTAKES = [
    (("frobnicate",), "No such command 'frobnicate'"),
    (("run", "--frobnicate", "hi"), "No such option: --frobnicate"),
    (("run", "hi", "--max-tokens"), "Option '--max-tokens' requires an argument"),
    (("run", "hi", "--max-tokens", "many"), "'many' is not an integer"),
    (("run", "hi", "--max-tokens", "0"), "--max-tokens is 0; it must be an integer of at least 1"),
    (("run", "hi", "--temperature", "nan"), "'nan' is not a number"),
    (("run", "hi", "--logprobs", "-1"), "--logprobs is -1"),
    (("run", "hi", "--stop", ""), "--stop is empty"),
    (("run", "one", "two"), "Got unexpected extra argument"),
    (("serve", "smollm2"), "headway serve --model smollm2"),
    (("chat", "smollm2"), "headway chat --model smollm2"),
    (("run", ""), "the prompt is empty"),
    (("run", "  \n "), "the prompt is empty"),
    (("run",), "the prompt is empty"),
    (("run", "-"), "the prompt is empty"),
    (("run", "hi", "--raw", "--system", "be kind"), "--system needs the chat template"),
    (("run", "hi", "--profile-json", "/no/such/folder/p.json"), "cannot write the profile to '/no/such/folder/p.json'"),
    (("run", "hi", "--model", "smolm2"), "there is no model 'smolm2'"),
    (("chat", "--model", "org/nothing"), "HF_HUB_OFFLINE is set"),
    (("models", "show", "smollm2"), "`headway models pull smollm2` fetches it"),
    (("models", "show", "nothing"), "there is no model 'nothing'"),
    (
        (
            "models",
            "rm",
        ),
        "no model was given",
    ),
    (("models", "rm", "smollm2"), "smollm2 is not installed"),
    (("models", "pull", "one", "--model", "two"), "two models were given, 'one' and 'two'"),
    (("doctor", "--check", "nothing"), "there is no model 'nothing'"),
    (("doctor", "--device", "tpu"), "device 'tpu'"),
    (("doctor", "--threads", "0"), "threads is 0"),
    (("doctor", "--context", "5"), "--context needs --check"),
    (("doctor", "--memory-fraction", "0.5"), "--memory-fraction needs --check"),
    *(
        ((*command, "--memory-fraction", given), words)
        for command in (("run", "hi"), ("chat",), ("serve",), ("lab",), ("bench", "decode"), ("bench", "serve"))
        for given, words in (
            ("0", "--memory-fraction is 0.0; it must be a number above 0 and at most 1"),
            ("1.5", "--memory-fraction is 1.5; it must be"),
            ("-0.1", "--memory-fraction is -0.1; it must be"),
            ("most", "'most' is not a number"),
        )
    ),
]


@pytest.mark.parametrize(
    ("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else ""
)
def test_a_mistake_is_one_sentence(
    headway: Run, empty_cache: dict[str, str], arguments: tuple[str, ...], words: str
) -> None:
    done = headway(*arguments, env=empty_cache)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("headway: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("run", "--json", "--frobnicate"), "UsageError"),
        (("run", "hi", "--json", "--max-tokens", "0"), "InvalidInput"),
        (("models", "show", "nothing", "--json"), "ModelNotFound"),
    ],
)
def test_a_mistake_is_json_when_json_was_asked(
    headway: Run, empty_cache: dict[str, str], arguments: tuple[str, ...], kind: str
) -> None:
    done = headway(*arguments, env=empty_cache)
    assert done.returncode == 2
    assert done.stderr == ""
    error = json.loads(done.stdout)["error"]
    assert error["type"] == kind
    assert error["message"]


def test_json_as_a_prompt_is_not_the_flag(headway: Run, empty_cache: dict[str, str]) -> None:
    done = headway("run", "--model", "nothing", "--", "--json", env=empty_cache)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("value", ["-1", "1e9999"])
def test_sampling_values_that_make_no_sense_are_refused_before_loading(
    headway: Run, empty_cache: dict[str, str], value: str
) -> None:
    done = headway("run", "hi", "--temperature", value, env=empty_cache)
    assert done.returncode == 2
    assert "temperature" in done.stderr
    assert "Traceback" not in done.stderr


def test_piped_input_that_is_not_text_is_refused(empty_cache: dict[str, str]) -> None:
    command = forked("-m", "headway.cli.main", "run")
    done = subprocess.run(command, input=b"abc\xff", capture_output=True, env=os.environ | empty_cache, check=False)
    assert done.returncode == 2
    assert b"not UTF-8 text (byte 3 is 0xff)" in done.stderr


class TestModels:
    def test_list_before_anything_is_pulled(self, headway: Run, empty_cache: dict[str, str]) -> None:
        lines = headway("models", "list", env=empty_cache).stdout.splitlines()
        assert lines[0].split("\t") == ["name", "installed", "size", "source", "path"]
        assert lines[1].split("\t")[:3] == ["smollm2", "no", "98.4 MB"]

    def test_list_as_json(self, headway: Run, empty_cache: dict[str, str]) -> None:
        model, *_ = json.loads(headway("models", "list", "--json", env=empty_cache).stdout)
        assert (model["name"], model["installed"], model["bytes"]) == ("smollm2", False, 98_362_432)

    def test_pull_prints_the_path_and_checks_what_is_there(self, headway: Run) -> None:
        path = store.resolve("smollm2")
        done = headway("models", "pull", "smollm2")
        assert (done.returncode, done.stdout.strip()) == (0, str(path))
        assert "checking smollm2" in done.stderr

    def test_show(self, headway: Run) -> None:
        store.resolve("smollm2")
        facts = json.loads(headway("models", "show", "smollm2", "--json").stdout)
        assert (facts["family"], facts["layers"], facts["parameters"]) == ("llama", 30, 134_515_008)
        assert facts["stored_types"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
        text = headway("models", "show").stdout
        assert "SmolLM2-135M-Instruct" in text
        assert "9 queries, 3 keys, 64 wide" in text

    def test_show_says_which_path_will_compute(self, headway: Run, tmp_path: Path) -> None:
        shown = headway("models", "show", str(save_hf(tmp_path, family_model("qwen3-moe")[1]))).stdout
        assert "(2 of 5 experts)" in shown
        assert "the native step on a CPU, Triton kernels on a CUDA device" in " ".join(shown.split())
        assert "not supported nothing is left out" in " ".join(shown.split())
        assert "the native step on a CPU" in headway("models", "show", "smollm2").stdout

    def test_show_and_doctor_know_recurrent_layers(self, headway: Run, tmp_path: Path) -> None:
        folder = str(save_hf(tmp_path, family_model("mamba2")[1]))
        shown = " ".join(headway("models", "show", folder).stdout.split())
        assert "2, 2 of them recurrent" in shown
        assert "the native step on a CPU, torch on a CUDA device" in shown
        assert "tree drafts" in shown
        checked = " ".join(headway("doctor", "--check", folder).stdout.split())
        assert "recurrent state" in checked
        assert "computed by torch" not in checked

    def test_show_and_doctor_know_latent_attention(self, headway: Run, tmp_path: Path) -> None:
        folder = str(save_hf(tmp_path, family_model("deepseek-v3")[1]))
        shown = " ".join(headway("models", "show", folder).stdout.split())
        assert "4 queries; latent attention, with one vector of 28 numbers a slot" in shown
        assert "the native step on a CPU, Triton kernels on a CUDA device" in shown
        assert "not supported nothing is left out" in shown
        assert "computed by torch" not in " ".join(headway("doctor", "--check", folder).stdout.split())

    @pytest.mark.parametrize("name", ["qwen3-moe", "gemma4", "lfm2"])
    def test_show_says_all_of_a_model_before_it_is_loaded(self, name: str, headway: Run, tmp_path: Path) -> None:
        """Architecture, parameters in all and of a token, context, formats, memory, the path, what is left out."""
        folder = save_hf(tmp_path, family_model(name)[1])
        facts = json.loads(headway("models", "show", str(folder), "--json").stdout)
        shown = " ".join(headway("models", "show", str(folder)).stdout.split())
        with hw.Engine(folder, pages=8, threads=1) as engine:
            info, can, config = engine.info, engine.capabilities, engine.config
        assert (facts["family"], facts["parameters"]) == (config.family, info.parameters)
        assert facts["active_parameters"] == config.active_parameters
        assert facts["memory_bytes"] == pytest.approx(info.weight_bytes, rel=0.02)
        assert 1000 * info.kv_bytes_per_token == 4000 * facts["kv_values_per_token"]
        assert facts["missing"] == list(can.missing())
        for line in ("parameters", "weights on disk", "memory of weights", "stored as F32", "context 1,024 positions"):
            assert line in shown
        assert f"memory of 1,000 tokens {render.size(1000 * info.kv_bytes_per_token)} in float32" in shown
        assert ("computed by the native step" in shown) == can.native
        assert f"not supported {(*can.missing(), 'nothing is left out')[0]}" in shown

    def test_show_knows_layers_that_differ(self, headway: Run, tmp_path: Path) -> None:
        folder = str(save_hf(tmp_path, family_model("gemma4")[1]))
        shown = " ".join(headway("models", "show", folder).stdout.split())
        assert "4 queries; 2 keys, 16 wide, in 3 layers; 2 keys, 24 wide, in 3 layers; 3 layers with keys of" in shown
        assert "the native step on a CPU, Triton kernels on a CUDA device" in shown

    def test_show_refuses_a_file_that_is_no_model(self, headway: Run, tmp_path: Path) -> None:
        file = tmp_path / "bad.gguf"
        file.write_bytes(b"GGUF\x03\x00")
        done = headway("models", "show", str(file))
        assert done.returncode == 2
        assert str(file) in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_table_on_a_terminal_is_drawn_and_plain_without_color(
        self, on_terminal: Callable[..., tuple[int, str]], empty_cache: dict[str, str]
    ) -> None:
        code, shown = on_terminal("models", "list", env=empty_cache)
        assert code == 0
        assert "───" in shown
        code, shown = on_terminal("models", "list", env=empty_cache | {"NO_COLOR": "1"})
        assert code == 0
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)
