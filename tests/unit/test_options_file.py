"""Options from a file, as on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from strobe.cli.options_file import expand_options_file
from strobe.server.server_settings import ServerConfig

TEXT = """
num-drafts: 7
max_model_len: 4096
adaptive: false
lenient: false
log-json: true
enforce_eager: false
stop: ["a b", c]
speculative-config: {method: dflash, num_speculative_tokens: 7}
draft:
"""
WORDS = [
    "--num-drafts=7", "--max-model-len=4096", "--no-adaptive", "--log-json",
    "--enforce-eager=false", "--stop=a b", "--stop=c",
    '--speculative-config={"method": "dflash", "num_speculative_tokens": 7}',
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "options.yaml"
    file.write_text(TEXT)
    return str(file)


@pytest.mark.parametrize("glued", [False, True])
def test_file_options_replace_the_config_option(path: str, glued: bool):
    named = [f"--config={path}"] if glued else ["--config", path]
    assert expand_options_file(["serve", *named, "--port=0"]) == ["serve", *WORDS, "--port=0"]


def test_command_line_overrides_file(path: str):
    options = ["--max-model-len", "9", "--adaptive"]
    expanded = expand_options_file(["serve", "--num-drafts=3", "--config", path, *options])
    others = [word for word in WORDS if word.split("=")[0] not in (
        "--num-drafts", "--max-model-len", "--no-adaptive")]  # fmt: skip
    assert expanded == ["serve", "--num-drafts=3", *others, *options]


def test_words_after_double_hyphen_are_not_options():
    assert expand_options_file(["generate", "--", "--config", "x"]) == [
        "generate",
        "--",
        "--config",
        "x",
    ]


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "1: 2", "a: [1,", "\x00"])
def test_invalid_options_file_is_a_one_line_error(tmp_path: Path, text: str):
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ValueError, match=r"^--config names .*bad, which (holds|cannot)"):
        expand_options_file(["serve", "--config", str(tmp_path / "bad")])


def test_missing_options_file_is_a_one_line_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be read \(.*No such file"):
        expand_options_file([f"--config={tmp_path}/none.yaml"])
    with pytest.raises(ValueError, match="--config needs a file after it"):
        expand_options_file(["serve", "--config"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile is set without ssl_certfile"),
        ({"root_path": "strobe"}, "root_path is 'strobe', but must begin with /"),
        ({"root_path": "/"}, "root_path is '/', but must"),
        ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
        ({"default_chat_template_kwargs": "{"}, "must be a JSON object"),
    ],
)
def test_invalid_settings_are_one_line_errors(options: dict[str, str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        ServerConfig(**options)
