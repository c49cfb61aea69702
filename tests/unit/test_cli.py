"""The commands generate, chat, info and demo, their options and their help."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from strobe import LLM, EngineConfig, SamplingParams, __version__
from strobe.cli.answer_view import AnswerView
from strobe.cli.main import COMMANDS
from strobe.cli.prompt import history_file
from strobe.demo_models import FAMILIES
from strobe.models.checkpoint import Checkpoint
from strobe.outputs import CompletionOutput, RequestOutput
from strobe.server.parsers.formats import REASONING_FORMATS
from strobe.tools import demo_comparison
from tests.support.text_pair import Pair

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "strobe"]
CPU = "--device=cpu"  # subprocesses do not see the fixture that hides GPUs
GREEDY = ["--temperature=0", "--max-tokens=8"]

ENGINE_FIELDS = [
    "target", "draft", "revision", "draft_revision", "method", "num_drafts",
    "adaptive", "draft_sample_method", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "kv_cache_memory", "state_cache_memory", "kv_offload_memory", "gpu_memory_utilization",
    "page_size",
    "enable_prefix_caching", "dtype", "device", "overlap",
    "tensor_parallel_size", "draft_tensor_parallel_size",
    "enable_expert_parallel", "load_format",
    "weight_dtype", "draft_weight_dtype", "kv_cache_dtype", "attention_backend",
    "draft_attention_backend", "kernels", "compile", "cuda_graphs", "seed",
    "ngram_max", "ngram_min",
    "shadow", "shadow_draft", "shadow_share",
]  # fmt: skip
SAMPLING_FIELDS = [
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "repetition_detection",
    "skip_special_tokens", "speculation",
]  # fmt: skip
API_ONLY = {
    "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs", "logprob_token_ids",
    "structured_outputs", "repetition_detection", "skip_special_tokens", "speculation",
}  # fmt: skip
SAMPLING_FLAGS = [
    f"--{name.replace('_', '-')}" for name in SAMPLING_FIELDS if name not in API_ONLY | {"n"}
]
ENGINE_FLAGS = [
    "--target", "--draft", "--num-drafts", "--adaptive", "--no-adaptive",
    "--draft-sample-method", "--max-model-len",
    "--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-memory",
    "--state-cache-memory", "--kv-offload-memory", "--gpu-memory-utilization", "--page-size",
    "--revision", "--draft-revision",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching", "--dtype", "--device", "--overlap", "--tensor-parallel-size",
    "--draft-tensor-parallel-size", "--enable-expert-parallel", "--load-format",
    "--weight-dtype", "--draft-weight-dtype", "--kv-cache-dtype", "--attention-backend",
    "--draft-attention-backend",
    "--kernels", "--compile", "--cuda-graphs", "--no-cuda-graphs", "--ngram-max", "--ngram-min",
]  # fmt: skip
FLAGS = {
    "generate": [
        "--chat", "--no-chat", "--thinking", "--system", "--json", "--debug", "--n",
        *SAMPLING_FLAGS, *ENGINE_FLAGS, "--method",
    ],
    "chat": ["--thinking", "--system", "--debug", *SAMPLING_FLAGS, *ENGINE_FLAGS, "--method"],
    "serve": [
        "--ray", "--host", "--port", "--allowed-hosts",
        "--api-key", "--api-key-file", "--ssl-certfile", "--ssl-keyfile",
        "--root-path", "--data-parallel-size", "--served-model-name", "--chat-template",
        "--default-chat-template-kwargs",
        "--trust-request-chat-template", "--tool-call-parser", "--reasoning-parser",
        "--max-waiting", "--max-repeats", "--request-timeout", "--grace", "--restart-engine",
        "--no-restart-engine", "--lenient", "--batch-dir", "--max-body-bytes", "--response-memory",
        "--cors-origin", "--access-log", "--no-access-log", "--log-level",
        "--log-json", "--log-prompts", "--otlp-traces-endpoint", "--kv-events-config",
        *ENGINE_FLAGS, "--method", "--seed", "--shadow", "--shadow-draft", "--shadow-share",
    ],
    "demo": ["--prompts", "--max-tokens", "--repeats", "--json", "--debug", *ENGINE_FLAGS],
    "info": [
        "--draft", "--tensor-parallel-size", "--draft-tensor-parallel-size",
        "--enable-expert-parallel", "--json",
    ],
}  # fmt: skip


# options


def test_settings_and_sampling_fields_are_listed_here():
    assert [field.name for field in fields(EngineConfig)] == ENGINE_FIELDS
    assert [field.name for field in fields(SamplingParams)] == SAMPLING_FIELDS


@pytest.mark.parametrize("command", FLAGS)
def test_help_lists_each_commands_options(main: Callable[..., Any], command: str):
    status, out, err = main(command, "--help")
    assert (status, err) == (0, "")
    rows = [line.strip("│| ") for line in out.splitlines()]
    listed = [flag for row in rows if row[:1] == "-" for flag in re.findall(r"--[a-z][a-z-]*", row)]
    assert sorted(listed) == sorted(["--help", *FLAGS[command]])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(main: Callable[..., Any], arguments: list[str]):
    status, out, err = main(*arguments)
    assert (status, err) == (0, "")
    for command in FLAGS:
        assert f"• {command}" in out


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_the_packages(main: Callable[..., Any], option: str):
    assert main(option) == (0, f"strobe {__version__}\n", "")


def test_help_lists_choices_of_enumerated_options(main: Callable[..., Any]):
    out = main("generate", "--help")[1]
    assert "--kernels {auto,triton,torch}" in out
    assert "--method {dflash,ngram,dflash+ngram,none}" in out


def test_help_shows_only_existing_defaults(main: Callable[..., Any]):
    out = re.sub(r"[\s│|]+", " ", main("generate", "--help")[1])
    assert "None)" not in out
    assert "(default: )" not in out
    assert "(default: 512)" in out  # of --max-tokens


@pytest.mark.parametrize("command", [*FLAGS, "run-batch", "doctor", "bench", "eval"])
def test_help_mentions_the_options_file(main: Callable[..., Any], command: str):
    out = re.sub(r"\s+", " ", main(command, "--help")[1])
    assert "Options can also come from a YAML file with one per line: --config FILE." in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_name_the_command(main: Callable[..., Any], command: str):
    about = main(command, "--help")[1]
    examples = about.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert examples
    assert all(line.strip().startswith(f"strobe {command}") for line in examples)


def test_help_of_serve_begins_with_what_people_use(main: Callable[..., Any]):
    out = main("serve", "--help")[1]
    about = out.split("positional arguments")[0]
    assert all(name in about for name in ("smollm2", "OpenAI", "Anthropic", "Ollama", "--port"))
    rows = [line.strip("│| ") for line in out.split("server options")[1].splitlines()]
    options = [row.split()[0] for row in rows if re.match("--[a-z]", row)]
    assert options[:4] == ["--host", "--port", "--api-key", "--served-model-name"]


def test_train_points_to_its_module(main: Callable[..., Any]):
    status, _, err = main("train", "--target", "x")
    assert status == 2
    assert "'train' is not a command; python -m strobe.tools.train trains a drafter" in err


def test_mistyped_packaged_model_is_suggested(main: Callable[..., Any]):
    for name in ("smollm3", "SmolLM2"):
        status, _, err = main("chat", name)
        assert status == 2
        assert f"strobe: {name} is neither a directory nor a model" in err
        assert "did you mean smollm2?" in err


def test_help_imports_no_torch():
    code = (
        "import sys\n"
        "from strobe.cli import main as cli\n"
        "try:\n    cli.main(['generate', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'safetensors'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stderr == "loaded []\n"


def test_options_reach_settings_and_sampling_params(
    main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    received: dict[str, Any] = {}

    class Stub:
        def __init__(self, **options: Any):
            received.update(options)

        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams(temperature=0.6, top_k=20)

        def generate(self, prompts: list[str], params: SamplingParams, **options: Any) -> Any:
            received.update(prompts=prompts, params=params)
            return [RequestOutput("r", p, [1], [CompletionOutput(0, "fine")]) for p in prompts]

    monkeypatch.setattr("strobe.llm.LLM", Stub)
    status, out, _ = main(
        "generate", "one", "two", "--no-chat", "--n=2", "--top-p=.9", "--min-p=0.1", "--seed=5",
        "--max-tokens=9", "--min-tokens=3", "--stop", "a b", "--stop=c", "--stop-token-ids=7",
        "--stop-token-ids", "8", "--include-stop-str-in-output", "--ignore-eos", "--target=t",
        "--draft=d", "--method=ngram", "--num-drafts=4", "--max-model-len=99", "--max-num-seqs=3",
        "--max-num-batched-tokens=77", "--kv-cache-memory=1GiB", "--page-size=8",
        "--no-enable-prefix-caching", "--dtype=bfloat16", "--device=cpu", "--overlap=2",
        "--ngram-max=6", "--ngram-min=1",
    )  # fmt: skip
    assert status == 0
    assert received.pop("prompts") == ["one", "two"]
    assert received.pop("params") == SamplingParams(
        n=2, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, seed=5, max_tokens=9, min_tokens=3,
        stop=["a b", "c"], stop_token_ids=[7, 8], include_stop_str_in_output=True,
        ignore_eos=True,
    )  # fmt: skip
    assert EngineConfig(**received) == EngineConfig(
        target="t", draft="d", method="ngram", num_drafts=4, max_model_len=99, max_num_seqs=3,
        max_num_batched_tokens=77, kv_cache_memory="1GiB", page_size=8,
        enable_prefix_caching=False, dtype="bfloat16", device="cpu", overlap=2, ngram_max=6,
        ngram_min=1,
    )  # fmt: skip
    assert out == "> one\nfine\n\n> two\nfine\n"
    main("generate", "one", "--no-chat", "--temperature=0", "--top-k=0")
    assert received["params"] == SamplingParams(temperature=0, top_k=0, max_tokens=512)


# generate


def test_one_prompt_prints_only_the_answer(main: Callable[..., Any], pair: Pair):
    llm = LLM(pair.target, pair.draft)
    params = SamplingParams(temperature=0, max_tokens=8)
    ((expected,),) = [o.outputs for o in llm.generate("hello", params, use_tqdm=False)]
    flags = [f"--target={pair.target}", f"--draft={pair.draft}", *GREEDY]
    assert main("generate", "hello", "--no-chat", *flags) == (0, expected.text + "\n", "")
    messages = [{"role": "system", "content": "Brief!"}, {"role": "user", "content": "hello"}]
    thinking = {"enable_thinking": True}
    ((expected,),) = [
        o.outputs for o in llm.chat(messages, params, use_tqdm=False, chat_template_kwargs=thinking)
    ]
    result = main("generate", "hello", "--system=Brief!", "--thinking", *flags)
    assert result == (0, expected.text + "\n", "")


def test_several_answers_are_labelled(main: Callable[..., Any], pair: Pair):
    status, out, err = main(
        "generate", "hello [b]there[/b]", "bye", "--n=2", "--seed=1", f"--target={pair.target}",
        "--max-tokens=3",
    )  # fmt: skip
    assert (status, err) == (0, "")
    heads = [line for line in out.splitlines() if line[:1] in (">", "[")]
    assert heads == ["> hello [b]there[/b]", "[1]", "[2]", "> bye", "[1]", "[2]"]


def test_json_goes_to_stdout_and_debug_to_stderr(pair: Pair):
    run = subprocess.run(
        [*RUN, "generate", "hello", "bye", "--json", "--debug", f"--target={pair.target}",
         f"--draft={pair.draft}", "--no-adaptive", CPU, *GREEDY],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.count("\n") == 1
    outputs = json.loads(run.stdout)["outputs"]
    assert len(outputs) == 2
    for output in outputs:
        assert list(output) == [
            "request_id", "prompt", "prompt_token_ids", "outputs", "num_cached_tokens",
            "prompt_logprobs",
        ]  # fmt: skip
        (answer,) = output["outputs"]
        assert list(answer) == [
            "index", "text", "token_ids", "finish_reason", "stop_reason", "speculation", "error",
            "logprobs", "cumulative_logprob",
        ]  # fmt: skip
        assert len(answer["token_ids"]) == 8
        assert list(answer["speculation"]) == [
            "used", "method", "steps", "drafted", "accepted", "acceptance_length",
            "accepted_per_position", "off_reason", "rows_verified", "drafts_made",
            "rested_steps", "rest_reason",
        ]  # fmt: skip
    lines = run.stderr.splitlines()
    start = next(i for i, line in enumerate(lines) if not line.startswith("strobe.models."))
    end = next(i for i, line in enumerate(lines) if line.startswith("strobe.ranks.leader:"))
    loaded = lines[:start]
    bill = lines[start:end]
    memory = lines[end]
    lines = lines[end + 1 :]
    assert all(line.startswith("strobe.models.weight_loading: loaded ") for line in loaded)
    assert bill[0] == "strobe.engine.build: Memory in bytes:"
    assert bill[1].split() == ["device", "cpu"]
    assert all(row.startswith("  ") for row in bill[1:])
    assert memory.startswith("strobe.ranks.leader: keys and values have 0.0")
    assert len(lines) == sum(o["outputs"][0]["speculation"]["steps"] for o in outputs)
    assert all(line.startswith("strobe.engine.result_processor: verify request=") for line in lines)


def test_closed_pipe_is_not_an_error(pair: Pair):
    run = subprocess.run(
        f"{sys.executable} -m strobe generate --help | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.startswith("usage: strobe generate")
    assert run.stderr == ""


def test_ctrl_c_ends_a_command_quietly(
    main: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "chat", interrupted)
    assert main("generate", "hello", f"--target={pair.target}") == (130, "", "")


# chat


def test_piped_chat_prints_plain_text(
    main: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    llm = LLM(pair.target)
    params = SamplingParams(temperature=0, max_tokens=6)
    off = {"enable_thinking": False}
    first = {"role": "user", "content": "hello [b]x[/b] :smile:"}
    (output,) = llm.chat([first], params, use_tqdm=False, chat_template_kwargs=off)
    text = output.outputs[0].text
    answer = {"role": "assistant", "content": text.strip()}
    second = [first, answer, {"role": "user", "content": "and?"}]
    (output,) = llm.chat(second, params, use_tqdm=False, chat_template_kwargs=off)
    second_text = output.outputs[0].text
    lines = ["hello [b]x[/b] :smile:", "", "  ", "word " * 600, "and?", "/new"]
    lines += ["hello [b]x[/b] :smile:", "/halp", "/exit", "too late"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    status, out, err = main("chat", f"--target={pair.target}", *GREEDY[:1], "--max-tokens=6")
    assert (status, err) == (0, "")
    shown = out.splitlines()
    assert shown.pop(len(text.splitlines()) + 1).endswith("/new starts over.")
    assert [line for line in shown if not line.startswith("6 tokens, ")] == (
        f"{text}\n{second_text}\nThe conversation is empty.\n{text}\n"
        "/halp is not a command; /help lists them."
    ).splitlines()
    assert out.count("tokens/s, plain: no drafter is loaded") == 3


def test_chat_commands_change_the_next_answer(
    main: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    path = tmp_path / "saved.json"
    lines = ["/system Be brief.", "hi", "/spec off", "hi", f"/save {path}", "/save", "/spec maybe"]
    lines += ["/system", "/save /nowhere/saved.json", "/save ~nobody-here/saved.json", "/help"]
    lines += ["/think on", "/new"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    status, out, _ = main("chat", f"--target={pair.target}", f"--draft={pair.draft}", *GREEDY)
    assert status == 0
    saved = json.loads(path.read_text())
    assert [message["role"] for message in saved] == ["system", *["user", "assistant"] * 2]
    assert saved[0]["content"] == "Be brief."
    assert out.index("dflash: ") < out.index("plain: the request turned speculation off")
    assert f"5 messages saved in {path}.\n" in out
    for sentence in (
        "The system message is 'Be brief.' now.",
        "There is no system message.",
        "Speculation is off.",
        "Thinking is on.",
        "The conversation is empty.",
    ):
        assert f"\n{sentence}\n" in f"\n{out}"
    assert "/save is not complete; write /save FILE.\n" in out
    assert "/spec maybe is not complete; write /spec on|off.\n" in out
    assert "/nowhere/saved.json cannot be written: No such file or directory.\n" in out
    assert all(f"\n{command}" in out for command in ("/new ", "/think on|off ", "/exit "))


def test_chat_loads_retries_and_sets_parameters(
    main: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    saved, again, damaged = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    damaged.write_text('[{"role": "user"}]')
    saved.write_text(json.dumps([{"role": "system", "content": "Be brief."},
                                 {"role": "user", "content": "hi"}]))  # fmt: skip
    lines = ["/retry", f"/load {damaged}", "/load /nowhere", f"/load {saved}", "/set max_tokens 3"]
    lines += ["/retry", "/set max-tokens 2", "/retry", "/set temperature -1", "/set wat 1", "/set"]
    lines += ["/set max_tokens", f"/save {again}"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    status, out, _ = main("chat", f"--target={pair.target}", f"--draft={pair.draft}", *GREEDY)
    assert status == 0
    assert "There is no message to answer; write one.\n" in out
    assert f"{damaged} is not a conversation: it must be a list of objects with role" in out
    assert "/nowhere cannot be read: No such file or directory.\n" in out
    assert f"2 messages loaded from {saved}.\n" in out
    assert out.index("\n3 tokens, ") < out.index("\n2 tokens, ")
    assert "temperature is -1" in out
    assert "'wat' is not a parameter; /set lists them.\n" in out
    assert "\nmin_p " in out
    assert out.endswith(f"\n3 messages saved in {again}.\n")
    assert [message["role"] for message in json.loads(again.read_text())] == [
        "system", "user", "assistant",
    ]  # fmt: skip


def test_retry_without_an_answer_keeps_the_last_one(
    main: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    saved, again = tmp_path / "a.json", tmp_path / "b.json"
    messages = [{"role": "user", "content": "hi " * 999}, {"role": "assistant", "content": "Yes."}]
    saved.write_text(json.dumps(messages))
    lines = [f"/load {saved}", "/retry", f"/save {again}"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    status, out, _ = main("chat", f"--target={pair.target}", *GREEDY)
    assert status == 0
    assert "The prompt has" in out
    assert json.loads(again.read_text()) == messages


@pytest.mark.parametrize("terminal", [True, False])
def test_thinking_is_dimmed_on_a_terminal_and_omitted_elsewhere(
    terminal: bool,
):
    console = Console(force_terminal=terminal, file=io.StringIO(), color_system="standard")
    shown = AnswerView(console, REASONING_FORMATS["qwen3"])
    shown.begin("<|im_start|>assistant\n")
    for piece in ("<think>\nI am ", "asked.\n</th", "ink>\n\nYes", "."):
        shown.push(piece)
    shown.end()
    dim = "\033[2mI am asked.\n\033[0m\n" if terminal else ""
    out = console.file.getvalue()
    assert out.replace("\n", "") == f"{dim}Yes.".replace("\n", "")
    assert shown.content.strip() == "Yes."


class Terminal:
    """A program on a pseudo-terminal of 80 columns."""

    def __init__(self, arguments: list[str], **environment: str):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(COLUMNS="80", TERM="xterm-256color", **environment)
            os.chdir(ROOT)
            os.execv(arguments[0], arguments)
        self.unread = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, text: str, seconds: float = 60) -> str:
        """Read until `text` appears; return the output up to its end."""
        deadline = time.monotonic() + seconds
        while text not in self.unread:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{text!r} did not appear in {self.unread!r}")
            if select.select([self.fd], [], [], 1)[0]:
                try:
                    self.unread += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"the program ended: {self.unread!r}") from None
        end = self.unread.index(text) + len(text)
        shown, self.unread = self.unread[:end], self.unread[end:]
        return shown

    def interrupt(self, text: str) -> str:
        """Press Ctrl-C and return the output up to and including `text`. Press again every 5 s: if
        the signal comes just before readline waits for input, Python handles it only at the next
        key."""
        for _ in range(11):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                return self.until(text, 5)
        return self.until(text, 5)

    def leave(self, key: str, seconds: float = 60) -> int:
        """Press `key` until the cursor moves to a new line, and return the exit status."""
        deadline = time.monotonic() + seconds
        self.unread = ""
        while "\n" not in self.unread:
            assert time.monotonic() < deadline, f"the program did not end: {self.unread!r}"
            self.type(key)
            while select.select([self.fd], [], [], 1)[0] and "\n" not in self.unread:
                self.unread += os.read(self.fd, 4096).decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self.fd)


@pytest.fixture
def open_chat(pair: Pair, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Return a function that opens a chat with these options on a terminal, with its history in
    `tmp_path`."""
    chats: list[Terminal] = []

    def open_(*options: str) -> Terminal:
        arguments = [*RUN, "chat", str(pair.target), f"--draft={pair.draft}", CPU, "--ignore-eos"]
        arguments += ["--temperature=0", "--no-adaptive", *options]
        chats.append(Terminal(arguments, XDG_STATE_HOME=str(tmp_path)))
        return chats[-1]

    yield open_
    for chat in chats:
        chat.close()


@pytest.fixture
def terminal(open_chat: Callable[..., Terminal]) -> Terminal:
    """A chat with long answers."""
    return open_chat("--max-tokens=450")


def test_terminal_chat_streams_stops_and_continues(terminal: Terminal):
    start = terminal.until("you>")
    assert "/help lists commands" in start
    assert start.count("Loading ") == 1, "a line, not a spinner beside a bar"
    terminal.type("hello\n")
    terminal.until("strobe>\x1b[0m ")
    terminal.until(" ")  # the answer has begun
    terminal.type("\x03")
    stopped = terminal.until("you>")
    assert "(stopped)" in stopped
    assert "tokens/s, dflash: " in stopped
    assert "450 tokens" not in stopped
    terminal.type("again\n")
    answer = terminal.until("you>")
    assert "tokens/s, dflash: " in answer
    assert "Traceback" not in answer
    terminal.type("/new\n")
    terminal.until("you>")
    terminal.interrupt("Ctrl-C again leaves, as Ctrl-D and /exit do.")
    terminal.until("you>")
    assert terminal.leave("\x03") == 0


@pytest.mark.full
def test_ctrl_c_after_an_answer_keeps_the_conversation(
    open_chat: Callable[..., Terminal], tmp_path: Path
):
    chat, saved = open_chat("--max-tokens=2"), tmp_path / "saved.json"
    chat.until("you>")
    for _ in range(2):
        chat.type("hello\n")
        chat.until("tokens per step")
        chat.until("you>")
        chat.interrupt("Ctrl-C again leaves")
        chat.until("you>")
    chat.type(f"/save {saved}\n")
    chat.until("messages saved in")
    assert [message["role"] for message in json.loads(saved.read_text())] == [
        "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    chat.until("you>")
    assert chat.leave("\x04") == 0


def test_pasted_lines_are_one_message(open_chat: Callable[..., Terminal], tmp_path: Path):
    chat, saved = open_chat("--max-tokens=2"), tmp_path / "saved.json"
    chat.until("you>")
    pastes = "one\ntwo", "/etc/hosts\nis a file", "three\nfour\n\nfive"
    chat.type(f"\x1b[200~{pastes[0]}\x1b[201~\n")
    for paste in pastes[1:]:
        chat.until("tokens per step")
        chat.until("you>")
        chat.type(paste + "\n")  # a terminal that does not mark pastes
    chat.until("tokens per step")
    chat.until("you>")
    chat.type(f"/spec off\n/save {saved}\n")  # typed ahead
    chat.until("messages saved in")
    messages = json.loads(saved.read_text())
    assert [m["content"] for m in messages if m["role"] == "user"] == list(pastes)


@pytest.mark.full
def test_history_is_private_and_shared_by_later_chats(
    open_chat: Callable[..., Terminal], tmp_path: Path
):
    chat, history = open_chat("--max-tokens=2"), tmp_path / "strobe" / "chat_history"
    chat.until("you>")
    chat.type("/spec on\n")
    chat.until("you>")
    chat.type("/new\n")
    chat.until("you>")
    assert history.read_text() == "/spec on\n/new\n"
    assert history.stat().st_mode & 0o777 == 0o600
    assert chat.leave("\x04") == 0
    second_chat = open_chat("--max-tokens=2")
    second_chat.until("you>")
    second_chat.type("\x1b[A\x1b[A")
    second_chat.until("spec on")


def test_no_history_without_a_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", Path("not/absolute")):
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        assert history_file() is None
    monkeypatch.delenv("XDG_STATE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert history_file() is None


def test_chat_wraps_answers_between_words():
    console = Console(force_terminal=True, file=io.StringIO(), width=20, _environ={"TERM": "xterm"})
    shown = AnswerView(console, None, column=8)
    for piece in ("One two th", "ree four"):
        shown.push(piece)
    shown.end()
    assert "\033[3D\033[K\nthree four" in console.file.getvalue()
    assert shown.content == "One two three four"


def test_chat_takes_its_target_by_position(main: Callable[..., Any], tmp_path: Path):
    status, _, err = main("chat", tmp_path / "none")
    assert status == 2
    assert str(tmp_path / "none") in err
    status, _, err = main("chat", "one", "--target=two")
    assert (status, err) == (
        2, "strobe: strobe chat has two values of target, one and two; name one.\n"
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["--target=/none"], ["/none"]])
def test_serve_takes_its_target_by_name_or_place(main: Callable[..., Any], arguments: list[str]):
    status, _, err = main("serve", *arguments, "--port=0", "--log-level=error")
    assert (status, "/none does not exist" in err) == (2, True)


@pytest.mark.parametrize(("command", "option"), [("doctor", "--target"), ("generate", "--prompt")])
def test_hint_names_no_argument_without_option(main: Callable[..., Any], command: str, option: str):
    assert main(command, option, "a") == (
        2, "", f"strobe: strobe {command} takes no {option!r}; strobe {command} --help lists what "
        "it takes.\n",
    )  # fmt: skip


# info


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a tensor is read."""

    def read(self: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read", read)


def assert_adds_up(memory: dict[str, Any]) -> None:
    """Check that the bytes of a bill's parts are those of all together."""
    parts = {name: size for name, size in memory.items() if isinstance(size, int)}
    del parts["tokens in the KV cache"]
    assert parts.pop("together") == sum(parts.values())


def test_info_describes_target_drafter_and_pair(
    main: Callable[..., Any], pair: Pair, no_weights: None
):
    status, out, err = main("info", pair.target, "--json")
    assert (status, err) == (0, "")
    target = json.loads(out)
    stored = target.pop("stored_weights")
    assert stored["MLP"] == "15 in float32, 92,160 bytes; held in float32, exact"
    assert_adds_up(target.pop("memory"))
    assert target == {
        "path": str(pair.target), "kind": "target", "architecture": "Qwen3ForCausalLM",
        "parameters": 185_344, "bytes_on_disk": 4 * 185_344, "layers": 5, "hidden_size": 32,
        "heads": "4 query, 2 key-value, 16 wide", "vocabulary": 2048, "context": 512,
        "kv_bytes_per_token_bf16": 2 * 5 * 2 * 16 * 2, "tie_embeddings": False,
        "dtype": "float32", "end_token_ids": [2, 0], "default_sampling": {},
    }  # fmt: skip
    draft = json.loads(main("info", pair.draft, "--json")[1])
    assert draft["kind"] == "DFlash drafter"
    assert draft["block_size"] == 8
    assert draft["mask_token_id"] == 3
    assert draft["reads_output_of_target_layers"] == [0, 1, 3]
    assert draft["parameters"] == 24_832
    facts = json.loads(main("info", pair.target, "--draft", pair.draft, "--json")[1])
    memory = facts.pop("memory")
    assert_adds_up(memory)
    assert memory["keys and values of draft"] > 0
    assert facts == {**target, "stored_weights": stored, "draft": draft, "pair": "fits"}


def test_info_says_what_each_rank_holds(main: Callable[..., Any], pair: Pair, no_weights: None):
    """Norms and the drafter's fc are on both ranks."""
    out = main("info", pair.target, "--draft", pair.draft, "--tensor-parallel-size=2", "--json")[1]
    facts, draft = json.loads(out), json.loads(main("info", pair.draft, "--json")[1])
    assert facts["ranks"] == 2
    kv, layers = "kv_bytes_per_token_bf16", "--draft-tensor-parallel-size=1"
    for model in (facts, facts["draft"]):
        whole = model["parameters"]
        assert whole / 2 < model["parameters_on_each_rank"] < whole * 0.57
        assert model[f"{kv}_on_each_rank"] == model[kv] / 2
    out = main("info", pair.target, "--draft", pair.draft, "--tp=2", layers, "--json")[1]
    assert json.loads(out)["draft"][f"{kv}_on_each_rank"] == draft[kv]
    assert json.loads(main("info", pair.target, "--tp-size", 2, "--json")[1])["ranks"] == 2
    status, _, err = main("info", pair.target, "--tensor-parallel-size=2", "--tp=4")
    assert (status, "both set tensor_parallel_size" in err) == (2, True)
    status, _, err = main("info", pair.target, "--tensor-parallel-size=3")
    assert status == 2
    assert "does not divide the target's" in err


def test_info_prints_a_table(
    main: Callable[..., Any], pair: Pair, tmp_path: Path, no_weights: None
):
    odd = pair.copied(tmp_path / "[b]:smile:")
    status, out, err = main("info", odd.target, "--draft", odd.draft)
    assert (status, err) == (0, "")
    assert out.startswith(f"{odd.target}\n")
    assert f"\n{odd.draft}\n" in out
    for fact in ("185,344", "fits", "0, 1, 3", "bidirectional in all 2 layers"):
        assert fact in out
    assert "\x1b" not in out


def test_info_describes_the_demo_models_by_default(main: Callable[..., Any], no_weights: None):
    facts = json.loads(main("info", "--json")[1])
    assert facts["path"].endswith("demo_models/target")
    assert facts["draft"]["path"].endswith("demo_models/draft")
    assert facts["pair"] == "fits"


def test_info_rejects_mismatched_or_missing_models(
    main: Callable[..., Any], pair: Pair, tmp_path: Path
):
    for arguments, sentence in [
        ((tmp_path,), f"{tmp_path / 'config.json'} does not exist; name a directory that holds"),
        ((pair.draft, "--draft", pair.draft), f"{pair.draft} is a drafter itself; name the target"),
        ((pair.target, "--draft", pair.target), "is not a drafter for DFlash"),
        (("", "--draft", pair.draft), "hidden_size is 32, the target's is 192"),
    ]:
        status, out, err = main("info", *arguments)
        assert (status, out) == (2, "")
        assert err.startswith("strobe: ")
        assert sentence in err
        assert err.count("\n") == 1


# demo


DEMO_KEYS = [
    "plain_tokens_per_s", "dflash_tokens_per_s", "speedup", "acceptance_length",
    "off_reason", "rested_share", "rest_reason", "identical", "prompts", "tokens", "device",
    "dtype", "threads", "torch", "python",
]  # fmt: skip


@pytest.fixture
def short_demo(pair: Pair) -> list[str]:
    """Arguments of a short demo on a random pair."""
    flags = ["--prompts=2", "--max-tokens=6", "--repeats=1"]
    return ["demo", f"--target={pair.target}", f"--draft={pair.draft}", *flags]


def test_demo_prints_one_object_with_these_keys(main: Callable[..., Any], short_demo: list[str]):
    status, out, err = main(*short_demo, "--json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    figures = json.loads(out)
    assert list(figures) == [*DEMO_KEYS, "kinds"]
    assert figures["identical"] is True
    assert list(figures["kinds"]) == ["chat", "code"]
    assert set(figures["kinds"]["chat"]) < set(DEMO_KEYS)
    assert (figures["prompts"], figures["tokens"], figures["device"]) == (2, 12, "cpu")
    assert figures["speedup"] > 0
    assert 1 <= figures["acceptance_length"] <= 8


def test_demo_shows_an_answer_and_a_table(
    main: Callable[..., Any], short_demo: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "60")
    status, out, err = main(*short_demo)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith("prompt> ")
    assert len(lines[0]) > 60, "the question was wrapped"
    assert lines[1].startswith("strobe> ")
    assert any(line.startswith("│ DFlash ") for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("│   ")] == ["chat", "code"]
    assert lines[-1].startswith("2 prompts, 12 tokens, outputs identical; cpu, float32")


def test_demo_wraps_its_answer_between_words(
    short_demo: list[str], monkeypatch: pytest.MonkeyPatch, pair: Pair
):
    llm = LLM(pair.target, pair.draft)
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    (example,) = demo_comparison.choose_examples(1)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    demo_comparison._stream(llm, example, demo_comparison.prompts_of(llm, [example])[0], params)
    answer = shown.getvalue().split("strobe>", 1)[1]
    plain = re.sub(r"\x1b\[[01;32]*m", "", answer)
    wraps = re.findall(r"\x1b\[(\d+)D\x1b\[K\n", plain)
    assert wraps, "no word met the right edge"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_demo_fails_when_outputs_differ(
    main: Callable[..., Any],
    short_demo: list[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
):
    race = demo_comparison.race

    def wrong(*arguments: Any) -> dict[str, demo_comparison.Run]:
        runs = race(*arguments)
        runs["dflash"].outputs[1].outputs[0].token_ids[-1] += 1
        return runs

    monkeypatch.setattr(demo_comparison, "race", wrong)
    status, out, _ = main(*short_demo, *flags)
    assert status == 1
    if flags:
        assert json.loads(out)["identical"] is False
    else:
        assert "outputs NOT identical" in out


@pytest.mark.parametrize("option", ["prompts", "repeats", "max-tokens"])
def test_demo_rejects_zero_before_loading(main: Callable[..., Any], option: str):
    status, out, err = main("demo", f"--{option}=0", "--device=cpu")
    assert (status, out) == (2, "")
    name = option.replace("-", "_")
    assert err == f"strobe: {name} is 0, but must be a whole number of at least 1.\n"


def test_demo_reports_a_prompt_that_cannot_run(main: Callable[..., Any], short_demo: list[str]):
    status, out, err = main(*short_demo, "--json", "--max-model-len=16")
    assert (status, out) == (2, "")
    assert err.startswith("strobe: The prompt has ")
    assert "max_model_len is 16" in err


def test_demo_says_how_many_chats_it_has(main: Callable[..., Any], short_demo: list[str]):
    status, out, err = main(*short_demo, "--prompts=13")
    assert (status, out) == (2, "")
    assert err == (
        "strobe: prompts is 13, but the demo has 12 for a named target; ask for at most 12.\n"
    )


def test_demo_prompts_are_heldout_examples_of_all_families():
    examples = demo_comparison.choose_examples(12)
    assert len(examples) == 12
    assert {example.family for example in examples} == set(FAMILIES)
    assert {example.thinking for example in examples} == {True, False}
    assert demo_comparison.choose_examples(1)[0] == examples[0]


def test_demo_models_accept_many_drafts(main: Callable[..., Any]):
    status, out, err = main("demo", "--json", "--prompts=1", "--repeats=1", "--max-tokens=20")
    assert (status, err) == (0, "")
    figures = json.loads(out)
    assert figures["identical"] is True
    assert figures["acceptance_length"] > 2  # measured 9.5
