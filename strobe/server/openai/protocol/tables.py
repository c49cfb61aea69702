"""The fields that clients send and that are not honoured, each with its reason.

docs/api.md shows these tables. A place is an endpoint or an object inside a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Note:
    """Why a field is not honoured; neutral: values that ask for nothing, accepted in silence."""

    why: str
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """Whether a value is one of the neutral ones; true is not 1 here."""
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in self.neutral
        )


Table = Mapping[str, Note]

_HOSTED = "it is for a hosted service's records"
_CACHE = "the prefix cache works by itself"

_ACCEPTED: Table = {
    "user": Note(_HOSTED),
    "metadata": Note("nothing is stored", ({},)),
    "store": Note("nothing is stored", (False,)),
    "service_tier": Note("there is one tier", ("auto", "default", "standard_only")),
    "safety_identifier": Note(_HOSTED),
    "access_programs": Note(_HOSTED),
    "prompt_cache_key": Note(_CACHE),
    "prompt_cache_retention": Note(_CACHE),
    "prompt_cache_options": Note(_CACHE, ({},)),
    "guided_decoding_backend": Note("there is one, llguidance"),
    "rid": Note("give the id as request_id"),
    "session_id": Note(_CACHE),
    "cache_prompt": Note(_CACHE, (True,)),
    "id_slot": Note(_CACHE, (-1,)),
    "keep_alive": Note("the model stays loaded"),
    "provider": Note("there is one server"),
    "usage": Note(
        "a response carries its usage; a stream with stream_options.include_usage", ({},)
    ),
    "log_metrics": Note("/metrics counts every request"),
    "data_parallel_rank": Note("there is one engine"),
    "timings_per_token": Note("include_speculation reports each step", (False,)),
    "return_progress": Note("there are no events of a prompt's progress", (False,)),
    "stream_interval": Note("a stream carries each step as it ends", (1,)),
}
"""Without effect on every endpoint that generates."""

_ACCEPTED_MESSAGES: Table = {
    "cache_control": Note(_CACHE),
    "speed": Note("there is one speed", ("standard",)),
    "inference_geo": Note("there is one server"),
    "diagnostics": Note("usage says what the prefix cache had", ({},)),
    "user_profile_id": Note(_HOSTED),
    "workspace_id": Note(_HOSTED),
}
"""Without effect on Anthropic's endpoints."""

NO_EFFECT: Mapping[str, Table] = {
    "chat": {
        **_ACCEPTED,
        "prediction": Note("drafts come from the server's own drafter"),
    },
    "completions": _ACCEPTED,
    "responses": {
        **{name: note for name, note in _ACCEPTED.items() if name not in ("metadata", "store")},
        "max_tool_calls": Note("it counts calls of built-in tools, and there are none"),
    },
    "messages": {**_ACCEPTED, **_ACCEPTED_MESSAGES},
    "count_tokens": _ACCEPTED_MESSAGES,
    "input_tokens": {},
    "tokenize": {},
    "detokenize": {},
    "stream_options": {
        "include_obfuscation": Note("chunks are not padded", (False,)),
    },
    "responses.stream_options": {
        "include_obfuscation": Note("chunks are not padded", (False,)),
        "include_usage": Note("the last event always carries the usage", (True,)),
    },
    "message": {
        "annotations": Note("a model reads no annotations", ([],)),
        "cache_control": Note(_CACHE),
        "id": Note(_HOSTED),
        "provider_specific_fields": Note(_HOSTED),
    },
    "part": {
        "annotations": Note("a model reads no annotations", ([],)),
        "cache_control": Note(_CACHE),
        "prompt_cache_breakpoint": Note(_CACHE),
        "logprobs": Note("a model reads no log probabilities", ([],)),
    },
    "tool_call": {
        "cache_control": Note(_CACHE),
        "provider_specific_fields": Note(_HOSTED),
    },
    "tool": {"cache_control": Note(_CACHE)},
    "responses.tool": {
        "cache_control": Note(_CACHE),
        "output_schema": Note("a tool's output is read as text"),
    },
    "structured_outputs": {
        "disable_fallback": Note("there is no other backend to fall back to", (False,)),
    },
    "json_schema": {"description": Note("the model does not see it; put it into the prompt")},
    "reasoning": {
        "summary": Note("the whole reasoning is returned, not a summary"),
        "generate_summary": Note("the whole reasoning is returned, not a summary"),
    },
    "item": {
        "phase": Note("chat templates have no phases"),
        "cache_control": Note(_CACHE),
        "encrypted_content": Note("it is readable for its maker only"),
    },
    "messages.tool": {
        "cache_control": Note(_CACHE),
        "eager_input_streaming": Note("arguments come as they are made", (True,)),
    },
    "block": {
        "cache_control": Note(_CACHE),
        "citations": Note("a model reads no citations", ([], {"enabled": False})),
        "is_error": Note("chat templates have no mark for it; say so in the content", (False,)),
        "data": Note("it is readable for its maker only"),
    },
    "thinking": {
        "budget_tokens": Note("the length of the reasoning cannot be limited"),
    },
}
"""Accepted and named in the response's `warnings`, by place."""

_BEAMS = "there is no beam search"
_PROCESSORS = "requests cannot bring code; logit_bias and allowed_token_ids are supported"
_MEDIA = "only text is supported"
_NO_TEMPLATE_ARGUMENT = "give it inside chat_template_kwargs"

_REFUSED: Table = {
    "logits_processors": Note(_PROCESSORS, ([],)),
    "logit_processors": Note(_PROCESSORS, ([],)),
    "custom_logit_processor": Note(_PROCESSORS, ("",)),
    "custom_params": Note(_PROCESSORS, ({},)),
    "bad_words": Note("logit_bias keeps single tokens out", ([],)),
    "use_beam_search": Note(_BEAMS, (False,)),
    "length_penalty": Note(_BEAMS, (1.0,)),
    "early_stopping": Note(_BEAMS, (False,)),
    "repetition_detection": Note("stop and max_tokens end an answer"),
    "stop_regex": Note("give texts as stop", ("", [])),
    "no_stop_trim": Note("give include_stop_str_in_output", (False,)),
    "spaces_between_special_tokens": Note("text is as the tokenizer makes it", (True,)),
    "guided_whitespace_pattern": Note("JSON is written with its usual white space"),
    "thinking_token_budget": Note("the length of the reasoning cannot be limited", (-1,)),
    "thinking_budget": Note("the length of the reasoning cannot be limited", (-1,)),
    "enable_thinking": Note(_NO_TEMPLATE_ARGUMENT),
    "separate_reasoning": Note("reasoning is separated where the model has a parser", (True,)),
    "stream_reasoning": Note("give include_reasoning: false to leave it out", (True,)),
    "kv_transfer_params": Note("there is one engine", ({},)),
    "vllm_xargs": Note("there are no custom extensions", ({},)),
    "mm_processor_kwargs": Note(_MEDIA, ({},)),
    "media_io_kwargs": Note(_MEDIA, ({},)),
    "lora_path": Note("there are no adapters"),
    "session_params": Note("there are no sessions", ({},)),
    "return_hidden_states": Note("they do not leave the engine", (False,)),
    "moderation": Note("there is no moderation"),
}
"""Refused on every endpoint that generates."""

_THINKING: Table = {"thinking": Note("give chat_template_kwargs or reasoning_effort", ({},))}

_KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_REFUSED_MESSAGES: Table = {
    "container": Note("there are no containers"),
    "mcp_servers": Note("the server calls no tools itself; give tools", ([],)),
    "context_management": Note("shorten the messages", ({}, {"edits": []}, _KEPT)),
    "output_format": Note("give output_config.format"),
    "prompt": Note("this endpoint takes messages"),
}
"""Refused on Anthropic's endpoints."""

_REFUSED_RESPONSES: Table = {
    "conversation": Note("there are no stored conversations; give previous_response_id"),
    "prompt": Note("there are no stored prompts; give instructions and input"),
    "truncation": Note("shorten the input", ("disabled",)),
    "messages": Note("give input"),
    "response_format": Note("give text.format"),
    "reasoning_effort": Note("give reasoning.effort"),
}
"""Refused on /v1/responses and /v1/responses/input_tokens."""

UNSUPPORTED: Mapping[str, Table] = {
    "chat": {
        **_REFUSED,
        **_THINKING,
        "prompt": Note("this endpoint takes messages"),
        "reasoning": Note("give reasoning_effort", ({},)),
        "audio": Note(_MEDIA),
        "modalities": Note(_MEDIA, (["text"], [])),
        "functions": Note("give tools", ([],)),
        "function_call": Note("give tool_choice", ("none", "auto")),
        "web_search_options": Note("there is no web search"),
        "documents": Note("put them into a message", ([],)),
        "verbosity": Note("ask for it in a message", ("medium",)),
        "best_of": Note("give n, or use /v1/completions", (1,)),
    },
    "completions": {
        **_REFUSED,
        **_THINKING,
        "messages": Note("this endpoint takes prompt"),
        "suffix": Note("text cannot be filled in before another", ("",)),
        "prompt_embeds": Note("give text or token ids", ([],)),
        "tools": Note("use /v1/chat/completions", ([],)),
        "reasoning_effort": Note("use /v1/chat/completions"),
        "reasoning": Note("use /v1/chat/completions", ({},)),
        "chat_template_kwargs": Note("use /v1/chat/completions", ({},)),
    },
    "responses": {
        **_REFUSED,
        **_THINKING,
        **_REFUSED_RESPONSES,
        "background": Note("an answer is made while its request waits", (False,)),
        "context_management": Note("shorten the input", ([],)),
        "previous_input_messages": Note("give input"),
        "enable_response_messages": Note("/tokenize shows a prompt", (False,)),
        "image": Note(_MEDIA),
        "n": Note("a response has one answer", (1,)),
    },
    "input_tokens": {
        **_REFUSED_RESPONSES,
        "personality": Note("give instructions"),
    },
    "messages": {
        **_REFUSED,
        **_REFUSED_MESSAGES,
        "max_completion_tokens": Note("give max_tokens"),
        "max_tokens_to_sample": Note("give max_tokens"),
        "response_format": Note("give output_config.format"),
        "reasoning_effort": Note("give output_config.effort"),
        "n": Note("a message has one answer", (1,)),
    },
    "count_tokens": _REFUSED_MESSAGES,
    "tokenize": {
        "documents": Note("put them into a message", ([],)),
        "mm_processor_kwargs": Note(_MEDIA, ({},)),
        "media_io_kwargs": Note(_MEDIA, ({},)),
    },
    "detokenize": {},
    "message": {
        "audio": Note(_MEDIA),
        "function_call": Note("give tool_calls"),
        "prefix": Note("give continue_final_message", (False,)),
    },
    "response_format": {
        "schema": Note('give {"type": "json_schema", "json_schema": {"schema": ...}}'),
    },
    "structured_outputs": {
        "whitespace_pattern": Note("JSON is written with its usual white space"),
        "structural_tag": Note("give grammar"),
        "disable_any_whitespace": Note("JSON is written with its usual white space", (False,)),
        "disable_additional_properties": Note("say so in the schema", (False,)),
    },
    "responses.tool": {
        "defer_loading": Note("all tools are in the prompt", (False,)),
        "allowed_callers": Note("the model itself is the only caller", (["direct"], [])),
    },
    "reasoning": {
        "context": Note("the chat template decides which reasoning is kept", ("auto",)),
        "mode": Note("there is one mode", ("standard",)),
    },
    "text": {"verbosity": Note("ask for it in the input", ("medium",))},
    "item": {
        "name": Note("the call says which function it was"),
        "namespace": Note("functions have no namespaces"),
        "caller": Note("the model itself is the only caller", ({"type": "direct"},)),
    },
    "messages.tool": {
        "defer_loading": Note("all tools are in the prompt", (False,)),
        "allowed_callers": Note("the model itself is the only caller", (["direct"], [])),
        "input_examples": Note("put them into the description", ([],)),
    },
    "block": {
        "caller": Note("the model itself is the only caller", ({"type": "direct"},)),
        "toolset_name": Note("there are no toolsets"),
    },
    "output_config": {
        "task_budget": Note("give max_tokens"),
    },
}
"""A 400 unless the value is neutral, by place."""
