"""The command line, as a user runs it: text on stdout, timings and errors on stderr, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monoplan import __version__
from monoplan.cli import common
from monoplan.cli.main import COMMANDS, main
from monoplan.ir.types import FLOATS, TARGETS, as_weight_dtype
from monoplan.models import AutoLlamaModel
from monoplan.runtime.machine.threads import default_threads
from tests.models.support import tiny_checkpoint

TARGET = ("--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It writes for seconds: time enough to stop it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=1 << 14, initializer_range=0.2)


def monoplan(*arguments: Any, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "monoplan", *map(str, arguments)],
        input="" if stdin is None else stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_generate_writes_text_to_stdout_and_timings_to_stderr(model: Path) -> None:
    done = monoplan("generate", "Once upon", "--raw", "-m", model, "-n", 12, *TARGET)
    assert done.returncode == 0, done.stderr
    expected = "".join(AutoLlamaModel.from_pretrained(model).generate("Once upon", 12))
    assert done.stdout == expected + "\n"
    for word in ("load", "compile", "prompt", "generation", "peak memory", "tokens/s"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def inside(model: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process, which is quicker, and gives its stdout; nothing may come on stderr."""

    def run(*arguments: Any) -> str:
        status = main([*map(str, arguments), "-m", str(model), *TARGET])
        out, err = capfd.readouterr()
        assert (status, err) == (0, "")
        return out

    return run


def test_the_prompt_may_come_from_stdin_an_option_or_a_file(model: Path, tmp_path: Path, inside: Any) -> None:
    (tmp_path / "prompt.txt").write_text("Once upon")
    piped = monoplan("generate", "-", "--raw", "-q", "-n", 5, "-m", model, *TARGET, stdin="Once upon")
    for source in (("-p", "Once upon"), ("-f", tmp_path / "prompt.txt")):
        assert inside("generate", *source, "--raw", "-q", "-n", 5) == piped.stdout
    assert piped.stderr == "" and len(piped.stdout) > 1


def test_the_chat_format_is_the_default_where_there_is_one(model: Path, inside: Any) -> None:
    loaded = AutoLlamaModel.from_pretrained(model)
    chat = "".join(loaded.generate(loaded.tokenizer.chat([{"role": "user", "content": "Hi"}]), 8))
    for option in ((), ("--chat",)):
        assert inside("generate", "Hi", "-q", "-n", 8, *option) == chat + "\n"
    assert inside("generate", "Hi", "-q", "-n", 8, "--raw") != chat + "\n"


def test_no_limit_of_tokens(model: Path, inside: Any) -> None:
    whole = inside("generate", "Once upon", "-q", "--raw", "-n", -1)
    result = AutoLlamaModel.from_pretrained(model).generate_batch(["Once upon"], 1000)[0]
    assert result.finish_reason == "length" and whole == result.text + "\n"


def test_json_of_generate(inside: Any) -> None:
    text = inside("generate", "Once upon", "-q", "--raw", "-n", 6)
    found = json.loads(inside("generate", "Once upon", "--raw", "-n", 6, "--json"))
    assert found["text"] + "\n" == text and found["finish_reason"] == "length" and len(found["tokens"]) == 6
    assert found["prompt"] == "Once upon" and found["prompt_tokens"] > 1 and found["generation_s"] > 0


def test_drafts_leave_the_text_as_it_is(model: Path, inside: Any) -> None:
    given = ("generate", "to be or not to be or", "-q", "--raw", "-n", 20, "--temp", 0.5)
    plain = inside(*given)
    assert inside(*given, "--lookup") == inside(*given, "--draft", model) == plain
    assert inside(*given, "--lookup", "--draft", model) == plain


def test_an_adapter_is_merged(model: Path, tmp_path: Path, inside: Any) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    module = "base_model.model.model.layers.0.self_attn.o_proj.lora_"
    random = np.random.default_rng(0)
    tensors = {"A": random.standard_normal((2, 32), np.float32), "B": random.standard_normal((32, 2), np.float32)}
    save_file({f"{module}{k}.weight": a for k, a in tensors.items()}, tmp_path / "adapter_model.safetensors")
    given = ("generate", "Once upon", "-q", "--raw", "-n", 20)
    merged = AutoLlamaModel.from_pretrained(model, adapter=tmp_path)
    assert inside(*given, "--adapter", tmp_path) == "".join(merged.generate("Once upon", 20)) + "\n" != inside(*given)


def test_bytes_that_are_no_text_are_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"caf\xe9 au lait")
    for arguments, name in ((("-f", tmp_path / "prompt"), f"the prompt in {tmp_path / 'prompt'}"), (("-",), "stdin")):
        command = [sys.executable, "-m", "monoplan", "generate", *map(str, arguments), "-m", str(model)]
        with open(tmp_path / "prompt", "rb") as stdin:
            done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=60)
        why = "byte 0xe9 at offset 3 is not UTF-8 text\n  to do: convert it to UTF-8"
        assert (done.returncode, done.stderr) == (1, f"monoplan: can't read {name}\n  why:   {why}\n")


def test_more_threads_than_cores_are_warned_of(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "Hi", "-m", str(model), "-n", "1", "--raw", *TARGET)
    most = default_threads({}).count
    for count, warned in ((most, 0), (most + 1, 1)):
        assert main([*command, "-t", str(count)]) == 0
        assert capfd.readouterr().err.count(f"threads are more than run at once, and slower than {most} (") == warned


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("gen",), "generate"),
        (("bench", "--n-"), "--n-prompt --n-gen"),
        (("verify", "--dtype", "float"), "float16 float32 float64"),
        (("generate", "x", "--dtype", "float"), "float16 float32"),
        (("golden", ""), "record check"),
        (("golden", "check", "--so"), "--source"),
        (("completion", "z"), "zsh"),
        (("generate", "READ"), ""),  # a file: bash's own
    ],
)
def test_bash_completes(words: tuple[str, ...], expected: str, completion: str) -> None:
    script = f'{completion}\nCOMP_WORDS=(monoplan "$@")\nCOMP_CWORD=$#\n_monoplan\necho "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


@pytest.fixture(scope="module")
def completion() -> str:
    return monoplan("completion", "bash").stdout


def test_other_shells(completion: str) -> None:
    assert monoplan("completion", "zsh").stdout == f"autoload -U +X bashcompinit && bashcompinit\n{completion}"
    fish = monoplan("completion", "fish").stdout.splitlines()
    assert all(
        line.startswith("complete -c monoplan -n '") and line.replace("\\'", "").count("'") % 2 == 0 for line in fish
    )
    options = "__fish_seen_subcommand_from chat' -l dtype -xa 'auto bfloat16 float16 float32' -d 'of the weights; "
    assert any(options in line for line in fish)


def test_pull_prints_where_the_model_is(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ((str(model),), ("-m", str(model))):
        assert main(["pull", *arguments]) == 0
        assert capfd.readouterr() == (f"{model}\n", "")
    assert main(["pull", "/nowhere/at/all"]) == 1
    assert "there is no such model" in capfd.readouterr().err


def test_the_version_is_the_packages() -> None:
    assert monoplan("--version").stdout == f"monoplan {__version__}\n"


def test_sampling_options(inside: Any) -> None:
    heat = ("--temp", "1.5", "--top-p", "0.95", "--top-k", "40", "--min-p", "0.01", "--repeat-penalty", "1.1")
    texts = [inside("generate", "Hi", "-q", "--raw", "-n", 16, *heat, "--seed", seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_chat_answers_each_line(model: Path) -> None:
    done = monoplan("chat", "-m", model, "-n", 4, "--temp", 0, *TARGET, stdin="Hi\n\n/reset\nHi\n/quit\nno\n")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second  # the same question to the same model, after it was reset
    assert "generation" in done.stderr


def test_slash_commands_of_the_chat(model: Path) -> None:
    lines = "/help\n/rest\n \n/etc/hosts\n /help\n"
    done = monoplan("chat", "-m", model, "-n", 4, "--temp", 0, "-q", *TARGET, stdin=lines)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2  # what is no command is said
    assert done.stderr.count("  /reset  forget the conversation\n") == 2
    assert done.stderr.count("there is no command /rest; did you mean /reset?\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_an_empty_line_at_a_terminal_does_nothing(model: Path) -> None:
    import pty

    master, slave = pty.openpty()
    command = [sys.executable, "-m", "monoplan", "chat", "-m", str(model), "-n", "4", "-q", *TARGET]
    with subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.write(master, b"\n\nHi\n\n/exit\n")
        out, err = process.communicate(timeout=60)
    os.close(master), os.close(slave)
    assert process.returncode == 0 and len(out.splitlines()) == 1, err
    assert err.startswith("Ctrl-D ends the chat") and err.count("> ") == 5


def test_chat_goes_on_after_a_line_that_is_too_long(model: Path) -> None:
    command = ("chat", "-m", model, "-n", 4, "--temp", 0, "-q", *TARGET)
    plain = monoplan(*command, stdin="Hi\nAnd?\n")
    done = monoplan(*command, stdin=f"Hi\n{'a' * 200}\nAnd?\n")
    assert done.returncode == 0 and done.stdout == plain.stdout and len(plain.stdout.splitlines()) == 2
    assert "monoplan: the line is left out: it has 2" in done.stderr and "the context of the model 96" in done.stderr


def test_chat_forgets_what_the_context_has_no_room_for(model: Path) -> None:
    command = ("chat", "-m", model, "-n", 4, "--temp", 0, "-q", "--system", "S", *TARGET)
    done = monoplan(*command, stdin=f"Hi\n{'a' * 30}\n{'b' * 30}\n")
    assert done.returncode == 0, done.stderr
    assert "monoplan: the first 2 questions are forgotten: the context of the model is 96 tokens" in done.stderr
    alone = monoplan(*command, stdin=f"{'b' * 30}\n")
    assert len(done.stdout.splitlines()) == 3 and done.stdout.endswith(alone.stdout) and alone.stderr == ""


def test_bench_prints_a_table_or_json(model: Path, inside: Any) -> None:
    common = ("bench", "-p", 16, "-n", 4, "-r", 2)
    table = monoplan(*common, "-m", model, *TARGET)
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()
    assert len(lines) == 4 and "pp16" in lines[2] and "tg4" in lines[3] and "±" in lines[3]
    found = json.loads(inside(*common, "--json"))
    assert [test["test"] for test in found["tests"]] == ["pp16", "tg4"]
    assert found["tests"][1]["bytes_per_s"] > 0 and len(found["tests"][0]["samples"]) == 2


def test_bench_says_what_it_cuts(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The context of the model is 96 tokens."""
    common = ("bench", "-m", str(model), "-r", "1", *TARGET)
    assert main([*common, "-p", "9000", "-n", "97", "--json"]) == 0
    out, err = capfd.readouterr()
    assert [test["test"] for test in json.loads(out)["tests"]] == ["pp96", "tg96"]
    assert "--n-prompt 9000 is cut to 96: the context" in err and "--n-gen 97 is cut to 96: the context" in err
    assert main([*common, "-p", "96", "--profile"]) == 0
    assert "--n-prompt 96 is cut to 95: the context" in capfd.readouterr().err
    assert main([*common, "-p", "96", "-n", "0", "--json"]) == 0
    assert capfd.readouterr().err == ""


def test_a_profile_without_a_prompt_is_that_of_the_first_token(inside: Any) -> None:
    assert inside("bench", "-p", 0, "--profile").startswith("one token: ")
    both = inside("bench", "-p", 4, "--profile")
    assert both.startswith("prompt: ") and "\none token: " in both


def test_compile_dumps_the_plan(model: Path, tmp_path: Path) -> None:
    done = monoplan("compile", model, "-o", tmp_path / "out", *TARGET)
    assert done.returncode == 0, done.stderr
    names = {file.name for file in (tmp_path / "out").rglob("*")}
    assert {"00_trace.ir", "plan.c", "plan.txt"} <= names


def test_the_reference_target_says_the_same(inside: Any) -> None:
    common = ("generate", "Once upon", "--raw", "-q", "-n", 12)
    assert inside(*common, "--target", "reference") == inside(*common, "-t", 1)


def test_stdout_may_be_closed() -> None:
    command = [sys.executable, "-m", "monoplan", "doctor"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_and_cache(tmp_path: Path) -> None:
    doctor = monoplan("doctor", MONOPLAN_CACHE_DIR=str(tmp_path))
    assert doctor.returncode == 0 and "python" in doctor.stdout
    for action, word in (("info", "entries"), ("prune", "removed 0"), ("clear", "removed 0")):
        done = monoplan("cache", action, MONOPLAN_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0 and word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "Hi", "-m", "/nowhere/at/all"), "there is no such model"),
        (("generate", "a" * 200, "--raw", "-m", "MODEL", *TARGET), "the context of the model"),
        (("verify", "MODEL", "--prompt", "a" * 200, *TARGET), "201 tokens, the context of the model 96"),
        (("generate", "-f", "/nowhere/at/all", "-m", "MODEL"), "can't read the prompt"),
        (("run-ir", "/dev/zero"), "no graph has over"),
        (("verify", "/nowhere", "--inputs", "/nowhere.npz"), "can't read the arrays of /nowhere.npz"),
    ],
)
def test_errors_are_messages_and_exit_code_1(
    model: Path, arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main([str(model) if a == "MODEL" else a for a in arguments])
    out, err = capfd.readouterr()
    assert status == 1 and message in err
    assert "Traceback" not in err and out == ""


HI = ("generate", "Hi", "-m", "/nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*HI, "--temp", "-1"), "--temp must be a number of 0 or more, got -1.0"),
        ((*HI, "--temp", "hot"), "--temp/--temperature must be a number, got 'hot'"),
        ((*HI, "-n", "0"), "--max-tokens must be a whole number above 0, or -1, got 0"),
        ((*HI, "--repeat-penalty", "0"), "--repeat-penalty must be a number above 0, got 0.0"),
        ((*HI, "--stop", ""), "--stop must be texts that are not empty"),
        ((*HI, "-t", "0"), "-t/--threads must be 1 or more, got 0"),
        ((*HI, "-p", "Hi"), "the prompt is given twice"),
        ((*HI, "--raw", "--system", "S"), "--system is a message of the chat format, which --raw leaves out"),
        ((*HI, "--raw", "--chat"), "--chat: not allowed with argument --raw"),
        (("generate", "", "-m", "/nowhere"), "the prompt is empty"),
        (("chat", "--top-p", "2", "-m", "/nowhere"), "--top-p must be a number above 0 and at most 1, got 2.0"),
        (("bench", "-r", "0"), "-r/--repetitions must be 1 or more, got 0"),
        (("bench", "-p", "-5"), "-p/--n-prompt must be 0 or more, got -5"),
        (("bench", "-n", "-5", "--profile"), "-n/--n-gen must be 0 or more, got -5"),
        (("bench", "-p", "0", "-n", "0"), "there is nothing to measure"),
        (("verify", "/nowhere", "--size", "batch"), "--size 'batch' is not NAME=NUMBER"),
        (("verify", "/nowhere", "-m", "/nowhere"), "the model is given twice"),
        (("cache", "prune", "--max-bytes", "-1"), "--max-bytes must be 0 or more, got -1"),
        (("compile", "/nowhere"), "the following arguments are required: -o/--output"),
        (("generat", "Hi"), "there is no command 'generat'\n  to do: did you mean generate?"),
        ((*HI, "--xyzzy=1"), "there is no option --xyzzy\n  to do: monoplan generate --help"),
        ((*HI, "--treads=3"), "there is no option --treads\n  to do: did you mean --threads?"),
        (("golden", "check", "--sourec", "x"), "there is no option --sourec\n  to do: did you mean --source?"),
        ((*HI, "--dtype", "bfloat"), "got 'bfloat'\n  to do: did you mean bfloat16?"),
        ((*HI, "--dtype", "float64"), "--dtype must be one of auto, bfloat16, float16, float32, got 'float64'"),
        (("cache", "prun"), "ACTION must be one of info, clear, prune, got 'prun'\n  to do: did you mean prune?"),
        ((*HI, "there"), "'there' is one word too many"),
    ],
)
def test_wrong_options_are_found_before_anything_is_loaded(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(arguments)
    out, err = capfd.readouterr()
    assert (status, out) == (2, "") and err.startswith("monoplan: ") and message in err


def test_the_options_are_those_of_the_library() -> None:
    assert common.TARGETS == TARGETS
    assert {as_weight_dtype(name) for name in (*common.DTYPES[1:], "float64")} == set(FLOATS)
    for name, (module, _) in COMMANDS.items():
        assert (Path(common.__file__).parent / f"{module}.py").is_file(), name


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", "MODEL", "-o", "/dev/null/x", *TARGET),
        ("report", "MODEL", "--no-profile", "-o", "/dev/null/x", *TARGET),
        ("golden", "record", "/dev/null/x", "MODEL", *TARGET),
        ("bench", "-p", "4", "--profile", "/dev/null/x", "-m", "MODEL", *TARGET),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_a_path_that_cannot_be_written_is_one_message(
    model: Path, arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    status = main([str(model) if a == "MODEL" else a for a in arguments])
    err = capfd.readouterr().err
    what = {"compile": "dump", "report": "report", "golden": "golden", "bench": "trace"}[arguments[0]]
    assert status == 1 and err.count("monoplan:") == 1 and f"monoplan: can't write the {what} to /dev/null/x" in err
    assert "Not a directory" in err or "File exists" in err
    assert "Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_is_one_message() -> None:
    command = [sys.executable, "-m", "monoplan", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_what_the_terminal_cannot_show_is_replaced(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = {word: token for word, token in tokenizer["model"]["vocab"].items() if len(word) > 1 or word == "?"}
    letters = {chr(0x6500 + token): token for token in tokenizer["model"]["vocab"].values()}
    tokenizer["model"]["vocab"] = letters | words
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ("generate", "日本", "--raw", "-n", 8, "-q", "-m", model, *TARGET)
    shown, hidden = (monoplan(*command, PYTHONIOENCODING=name) for name in ("utf-8", "latin-1"))
    assert shown.returncode == hidden.returncode == 0 and hidden.stderr == ""
    assert hidden.stdout == shown.stdout.encode("latin-1", "replace").decode() != shown.stdout


def test_debug_level_3_tells_what_layers_have_in_common_once(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONOPLAN_DEBUG", "3")
    assert main(["generate", "Hi", "-q", "-n", "1", "-m", str(model), "--target", "reference", *TARGET]) == 0
    passes = re.split(r"^  \S+: .* ms$", capfd.readouterr().err, flags=re.M)
    misses = [re.findall(r"^    (.* did not fire at .*)$", text, re.M) for text in passes]
    assert any(" times)" in line for lines in misses for line in lines)
    for lines in misses:
        alike = {re.sub(r"\d+|%[\w.]+", "#", line) for line in lines}
        assert len(alike) == len(lines)


def test_damaged_weights_are_one_message(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = monoplan("generate", "Hi", "-m", tmp_path, *TARGET)
    assert done.returncode == 1 and "damaged" in done.stderr and "Traceback" not in done.stderr
    shown = monoplan("generate", "Hi", "-m", tmp_path, *TARGET, MONOPLAN_DEBUG="1")
    assert shown.returncode == 1 and "Traceback" in shown.stderr


def test_help_is_quick_and_lists_the_commands() -> None:
    begin = time.perf_counter()
    done = monoplan("--help")
    took = time.perf_counter() - begin
    for command in ("generate", "chat", "bench", "compile", "doctor", "cache"):
        assert command in done.stdout
    assert done.returncode == 0 and took < 5.0  # 0.2 s on an idle machine; this one may be busy
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "monoplan", "--help"], capture_output=True, text=True
    ).stderr
    assert "numpy" not in loaded and "tokenizers" not in loaded
    assert monoplan("generate", "--help").returncode == 0
    assert monoplan("nonsense").returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_stops_and_prints_the_timings(long_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "monoplan", "generate", "Once", "--raw", "-m", str(long_model), "-n", "16000", *TARGET],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it has begun to write
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert b"peak memory" in errors and b"Traceback" not in errors


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_reader_that_leaves_is_no_error(long_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "monoplan", "generate", "Once", "--raw", "-m", str(long_model), "-n", "16000", *TARGET],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=30) == 141 and b"Traceback" not in errors and b"BrokenPipe" not in errors
