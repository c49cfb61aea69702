"""Formats by name, detected from chat templates, and combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from strobe import demo_models
from strobe.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, detect, make_parser
from tests.server.support.parser_runs import parse

CHATML = "<|im_start|>assistant\n"
HERMES = CHATML + r"{{- '<tool_call>\n{\"name\": \"' }}{{- '\", \"arguments\": ' }}</tool_call>"
QWEN3 = HERMES + "{%- if '</think>' in message.content %}<think>"
CODER = CHATML + "<tool_call>\n<function=' + call.name + '>\n<parameter=' + key + '></tool_call>"
SEED = CHATML + "<tool_call>\n<function=' + call.name + '>{{ 'arguments': 1 }}</tool_call>"
GLM = '<tool_call>{name}\n<arg_key>{k}</arg_key></tool_call> {{ "arguments": 1 }}<think></think>'
LLAMA3 = '<|start_header_id|>ipython{{- \'{"name": "\' }}{{- \'"parameters": \' }}'
HARMONY = "<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>"
GEMMA4 = "<|turn>model\n<|tool_call>call:' + name + '{'}}{{'}<tool_call|>' }}<|channel>x<channel|>"
MISTRAL = "[INST]{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}[THINK]x[/THINK]"
V31 = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}<think></think>"
V3 = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n'"
R1 = "{{'<|Assistant|><think>\\n'}}{% set content = content.split('</think>')[-1] %}"


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        (HERMES, ("hermes", None)),
        (QWEN3, ("hermes", "qwen3")),
        (CODER, ("qwen3_coder", None)),
        (SEED, (None, None)),
        (GLM, (None, "qwen3")),
        (LLAMA3, ("llama3", None)),
        (HARMONY, ("gpt_oss", "gpt_oss")),
        (GEMMA4, ("gemma4", "gemma4")),
        (MISTRAL, ("mistral", "mistral")),
        (MISTRAL.replace("THINK", ""), ("mistral", None)),
        (V31, ("deepseek_v31", "qwen3")),
        (V3, ("deepseek_v3", None)),
        (R1, (None, "qwen3")),
        (CHATML, (None, None)),
        ("", (None, None)),
        (None, (None, None)),
    ],
)
def test_formats_are_detected_from_the_chat_template(
    template: str | None, formats: tuple[str | None, str | None]
):
    assert detect(template) == formats


def test_demo_target_formats_are_detected():
    directory = Path(demo_models.__file__).parent / "target"
    template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    assert detect(template) == ("hermes", "qwen3")


def test_vllm_names_are_aliases():
    assert TOOL_FORMATS["llama3_json"] is TOOL_FORMATS["llama3"]
    assert TOOL_FORMATS["openai"] is TOOL_FORMATS["gpt_oss"]
    assert TOOL_FORMATS["qwen3_xml"] is TOOL_FORMATS["qwen3_coder"]
    assert REASONING_FORMATS["openai_gptoss"] is REASONING_FORMATS["gpt_oss"]
    assert REASONING_FORMATS["deepseek_r1"] is REASONING_FORMATS["qwen3"]


def test_detected_formats_are_registered():
    for template in (HERMES, QWEN3, LLAMA3, HARMONY, CODER, GEMMA4, MISTRAL, V3, V31):
        tool, reasoning = detect(template)
        assert tool in TOOL_FORMATS
        assert reasoning is None or reasoning in REASONING_FORMATS


def test_all_is_content_without_formats():
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert parse(make_parser(None, None), [text[:9], text[9:]]) == ("", text, [])
    assert make_parser(None, None).phase == "answer"


@pytest.mark.parametrize(
    ("tool", "reasoning", "named"),
    [
        ("hermez", None, "no tool format 'hermez'"),
        (None, "hermes", "no reasoning format 'hermes'"),
        ("hermes", "gpt_oss", "hermes and the reasoning format gpt_oss"),
        ("openai", "qwen3", "openai and the reasoning format qwen3"),
    ],
)
def test_unknown_or_conflicting_names_are_rejected(
    tool: str | None, reasoning: str | None, named: str
):
    with pytest.raises(ValueError, match=named):
        make_parser(tool, reasoning)
