"""Chat templates of many families: what they read, and the prompts that they then render."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.text.chat_template import NO_SYSTEM_MESSAGE, ONE_SYSTEM_MESSAGE
from strobe.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Without tools, as SmolLM2's."""

LOOP_OVER_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m.role + ':' + m.content[0].text }};{% endfor %}"
SELECTED_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content | selectattr('type', 'equalto',"
    " 'text') %}{{ part['text'] }}{% endfor %};{% endfor %}"
)
USER_PARTS = (
    "{% for m in messages %}{% if m.role == 'user' %}user:{{ m.content[0]['text'] }};"
    "{% else %}{{ m.role + ':' + m.content }};{% endif %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)

JOINED_ARGUMENTS = (
    "{% for m in messages %}{% if m.tool_calls is defined %}<{{ m['content'] + 'C' }}"
    "{% for tool in m['tool_calls'] %}{{ ' ' + tool['function']['name'] + ' ' + "
    "tool['function']['arguments'] }}{% endfor %}>"
    "{% else %}<{{ m['role'] + ' ' + m['content'] }}>{% endif %}{% endfor %}"
)
"""As DeepSeek-V3's: the content and the arguments must be text."""
PRINTED_ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments }}{% endfor %}>{% endfor %}"
)
NULL_CONTENT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}<C"
    "{% for tool in m['tool_calls'] %}{{ ' ' + tool['function']['name'] + ' ' + "
    "tool['function']['arguments'] }}{% endfor %}>"
    "{% else %}<{{ m['role'] + ' ' + m['content'] }}>{% endif %}{% endfor %}"
)
"""As DeepSeek-R1's first template: content that is null marks calls."""
OBJECT_ARGUMENTS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}>{% endfor %}"
)

FIRST_SYSTEM_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role + ':' + m.content }};{% endfor %}"
)
LATER_SYSTEMS_DROPPED = (
    "{% if messages[0].role == 'system' %}system:{{ messages[0].content }};{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content }};{% endfor %}"
)
LEADING_SYSTEMS = (
    "{% set seen = namespace(turn=false) %}{% for m in messages %}"
    "{% if m.role == 'system' and seen.turn %}{{ raise_exception('late') }}{% endif %}"
    "{% if m.role != 'system' %}{% set seen.turn = true %}{% endif %}"
    "{{ m.role + ':' + m.content }};{% endfor %}"
)
ALTERNATING_WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ m.role + ':' + m.content }};{% endfor %}"
)
"""As Gemma 2's."""

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(arguments: Any = '{"city": "Bern"}', content: Any = None) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return message("assistant", content, tool_calls=calls)


SYSTEM, LATE = message("system", "Be brief."), message("system", "Use French.")
USER, ANSWER = message("user", "Weather?"), message("assistant", "Where?")
RESULT = message("tool", "sunny", tool_call_id="call_1")


def text(tokenizer: Tokenizer, template: str, *messages: dict[str, Any], **options: Any) -> str:
    return tokenizer.chat_text(list(messages), chat_template=template, **options)


@pytest.mark.parametrize("template", [LOOP_OVER_PARTS, FIRST_PART, SELECTED_PARTS, USER_PARTS])
def test_templates_that_read_parts_get_parts(tokenizer: Tokenizer, template: str):
    rendered = text(tokenizer, template, SYSTEM, USER, ANSWER, USER)
    assert rendered == "system:Be brief.;user:Weather?;assistant:Where?;user:Weather?;"
    several = message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert text(tokenizer, template, several) == "user:a\nb;"


def test_templates_that_read_both_forms_get_text(tokenizer: Tokenizer):
    assert text(tokenizer, EITHER, USER) == "user:Weather?;"
    assert tokenizer.capabilities(EITHER).part_roles == frozenset()
    assert tokenizer.capabilities(USER_PARTS).part_roles == {"user"}


def test_last_message_in_parts_can_be_continued(tokenizer: Tokenizer):
    rendered = text(
        tokenizer,
        LOOP_OVER_PARTS,
        USER,
        ANSWER,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert rendered == "user:Weather?;assistant:Where?"


def test_special_tokens_in_parts_stay_plain_text(tokenizer: Tokenizer):
    chat = tokenizer.render(
        [message("user", "<|im_end|>")], chat_template=LOOP_OVER_PARTS, add_generation_prompt=False
    )
    assert chat.text == "user:<|im_end|>;"
    assert tokenizer.encode("<|im_end|>")[0] not in tokenizer.encode_chat(chat)


@pytest.mark.parametrize("arguments", ['{"city": "Bern"}', {"city": "Bern"}])
def test_templates_that_join_arguments_get_json_text(tokenizer: Tokenizer, arguments: Any):
    messages = [USER, call(arguments), RESULT, ANSWER]
    rendered = text(tokenizer, JOINED_ARGUMENTS, *messages)
    expected = '<C get_weather {"city": "Bern"}><tool sunny><assistant Where?>'
    assert rendered == "<user Weather?>" + expected
    assert text(tokenizer, NULL_CONTENT, *messages) == "<user Weather?>" + expected


def test_printed_arguments_are_json_and_no_python(tokenizer: Tokenizer):
    assert 'get_weather {"city": "Bern"}>' in text(tokenizer, PRINTED_ARGUMENTS, USER, call())


@pytest.mark.parametrize("arguments", ['{"city": "Bern"}', {"city": "Bern"}])
def test_templates_that_convert_arguments_get_objects(tokenizer: Tokenizer, arguments: Any):
    rendered = text(tokenizer, OBJECT_ARGUMENTS, USER, call(arguments), RESULT)
    assert rendered == '<user Weather?><assistant get_weather {"city": "Bern"}><tool sunny>'


def test_arguments_that_are_no_object_stay_text(tokenizer: Tokenizer):
    assert "get_weather half{>" in text(tokenizer, JOINED_ARGUMENTS, USER, call("half{"))


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (FIRST_SYSTEM_ONLY, [SYSTEM, LATE, USER], "system:Be brief.\n\nUse French.;user:Weather?;"),
        (
            FIRST_SYSTEM_ONLY,
            [USER, ANSWER, LATE, USER],
            "system:Use French.;user:Weather?;assistant:Where?;user:Weather?;",
        ),
        (
            LATER_SYSTEMS_DROPPED,
            [SYSTEM, USER, LATE],
            "system:Be brief.\n\nUse French.;user:Weather?;",
        ),
        (
            LEADING_SYSTEMS,
            [SYSTEM, USER, LATE],
            "system:Be brief.\n\nUse French.;user:Weather?;",
        ),
    ],
)
def test_refused_system_messages_are_joined_in_the_first(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], expected: str
):
    chat = tokenizer.render(messages, chat_template=template)
    assert (chat.text, chat.warnings) == (expected, (ONE_SYSTEM_MESSAGE,))


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (FIRST_SYSTEM_ONLY, [SYSTEM, USER]),
        (LATER_SYSTEMS_DROPPED, [USER, ANSWER]),
        (LEADING_SYSTEMS, [SYSTEM, LATE, USER]),
        (EITHER, [SYSTEM, USER, LATE, SYSTEM]),
    ],
)
def test_accepted_system_messages_stay_in_place(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]]
):
    chat = tokenizer.render(messages, chat_template=template)
    assert chat.text == "".join(f"{m['role']}:{m['content']};" for m in messages)
    assert chat.warnings == ()


def test_template_without_system_messages_gets_them_as_user(tokenizer: Tokenizer):
    chat = tokenizer.render([SYSTEM, USER], chat_template=ALTERNATING_WITHOUT_SYSTEM)
    assert (chat.text, chat.warnings) == ("user:Be brief.\n\nWeather?;", (NO_SYSTEM_MESSAGE,))


@pytest.mark.parametrize("content", [None, ""])
def test_turns_of_tools_render_without_a_place_for_them(tokenizer: Tokenizer, content: Any):
    second = message("tool", "warm", tool_call_id="call_2")
    rendered = text(tokenizer, CHATML, USER, call(content=content), RESULT, second)
    assert rendered == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nwarm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_turns_of_tools_alternate_where_the_template_asks(tokenizer: Tokenizer):
    rendered = text(
        tokenizer, ALTERNATING_WITHOUT_SYSTEM, USER, call(content="Let me see."), RESULT, USER
    )
    assert rendered == (
        'user:Weather?;assistant:Let me see.\n<tool_call>\n{"name": "get_weather", '
        '"arguments": {"city": "Bern"}}\n</tool_call>;'
        "user:<tool_response>\nsunny\n</tool_response>\n\nWeather?;"
    )


def test_answer_of_reasoning_alone_has_an_empty_text(tokenizer: Tokenizer):
    thought = message("assistant", None, reasoning_content="hm")
    assert "<|im_start|>assistant\n<|im_end|>" in text(tokenizer, CHATML, USER, thought)


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_tools_are_described_in_the_system_message(
    tokenizer: Tokenizer, system: list[dict[str, Any]]
):
    chat = tokenizer.render([*system, USER], chat_template=CHATML, tools=[TOOL])
    first, second, *_ = chat.text.split("<|im_end|>\n")
    assert first.startswith("<|im_start|>system\n" + "Be brief.\n\n" * len(system))
    assert json.dumps(TOOL) in first.splitlines()
    example = '{"name": "NAME_OF_FUNCTION", "arguments": {"NAME_OF_ARGUMENT": "VALUE"}}'
    assert f"<tool_call>\n{example}\n</tool_call>" in first
    assert second == "<|im_start|>user\nWeather?"
    assert chat.warnings == ()


def test_tools_are_described_to_a_template_without_system_messages(tokenizer: Tokenizer):
    rendered = text(tokenizer, ALTERNATING_WITHOUT_SYSTEM, USER, tools=[TOOL])
    assert rendered.startswith("user:")
    assert rendered.endswith("\n\nWeather?;")
    assert json.dumps(TOOL) in rendered


def test_described_calls_have_the_form_that_the_template_writes(tokenizer: Tokenizer):
    rendered = text(tokenizer, JOINED_ARGUMENTS, USER, tools=[TOOL])
    assert json.dumps(TOOL) in rendered
    assert 'C NAME_OF_FUNCTION {"NAME_OF_ARGUMENT": "VALUE"}' in rendered
    assert "<tool_call>" not in rendered


def test_templates_with_tools_write_them(tokenizer: Tokenizer):
    assert text(tokenizer, OBJECT_ARGUMENTS, USER, tools=[TOOL]) == (
        json.dumps(TOOL) + "<user Weather?>"
    )


def test_template_is_probed_once(tokenizer: Tokenizer):
    template = CHATML + "{# probed once #}"
    assert tokenizer.capabilities(template) is tokenizer.capabilities(template)


def test_demo_template_renders_as_transformers_does(tokenizer: Tokenizer):
    messages = [SYSTEM, USER, call({"city": "Bern"}), RESULT, ANSWER, USER]
    plain = tokenizer.hf.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.chat_text(messages, tools=[TOOL]) == plain
