"""The fields that clients send and the server does not honour, each with its reason.

docs/api.md shows these tables. Their keys are endpoints and objects inside a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FieldRule:
    """Why a field is not honoured. neutral_values: values that change nothing, accepted without
    a warning."""

    reason: str
    neutral_values: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """Whether a value is neutral; here true and 1 are different values."""
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral_values
        )


Table = Mapping[str, FieldRule]

_HOSTED = "it is for a hosted service's records"
_CACHE = "the prefix cache works by itself"

_ACCEPTED: Table = {
    "user": FieldRule(_HOSTED),
    "metadata": FieldRule("nothing is stored", ({},)),
    "store": FieldRule("nothing is stored", (False,)),
    "service_tier": FieldRule("there is one tier", ("auto", "default", "standard_only")),
    "safety_identifier": FieldRule(_HOSTED),
    "access_programs": FieldRule(_HOSTED),
    "prompt_cache_key": FieldRule(_CACHE),
    "prompt_cache_retention": FieldRule(_CACHE),
    "prompt_cache_options": FieldRule(_CACHE, ({},)),
    "guided_decoding_backend": FieldRule("there is one, llguidance"),
    "rid": FieldRule("give the id as request_id"),
    "session_id": FieldRule(_CACHE),
    "cache_prompt": FieldRule(_CACHE, (True,)),
    "id_slot": FieldRule(_CACHE, (-1,)),
    "keep_alive": FieldRule("the model stays loaded"),
    "provider": FieldRule("there is one server"),
    "usage": FieldRule(
        "a response carries its usage; a stream with stream_options.include_usage", ({},)
    ),
    "log_metrics": FieldRule("/metrics counts every request"),
    "data_parallel_rank": FieldRule("there is one engine"),
    "timings_per_token": FieldRule("include_speculation reports each step", (False,)),
    "return_progress": FieldRule("there are no events of a prompt's progress", (False,)),
    "stream_interval": FieldRule("a stream carries each step as it ends", (1,)),
}
"""Fields without effect on every endpoint that generates."""

_ACCEPTED_MESSAGES: Table = {
    "cache_control": FieldRule(_CACHE),
    "speed": FieldRule("there is one speed", ("standard",)),
    "inference_geo": FieldRule("there is one server"),
    "diagnostics": FieldRule("usage counts tokens found in the prefix cache", ({},)),
    "user_profile_id": FieldRule(_HOSTED),
    "workspace_id": FieldRule(_HOSTED),
}
"""Fields without effect on Anthropic's endpoints."""

NO_EFFECT: Mapping[str, Table] = {
    "chat": {
        **_ACCEPTED,
        "prediction": FieldRule("drafts come from the server's own drafter"),
    },
    "completions": _ACCEPTED,
    "responses": {
        **{name: rule for name, rule in _ACCEPTED.items() if name not in ("metadata", "store")},
        "max_tool_calls": FieldRule("it counts calls of built-in tools, and there are none"),
    },
    "messages": {**_ACCEPTED, **_ACCEPTED_MESSAGES},
    "count_tokens": _ACCEPTED_MESSAGES,
    "input_tokens": {},
    "tokenize": {},
    "detokenize": {},
    "stream_options": {
        "include_obfuscation": FieldRule("chunks are not padded", (False,)),
    },
    "responses.stream_options": {
        "include_obfuscation": FieldRule("chunks are not padded", (False,)),
        "include_usage": FieldRule("the last event always carries the usage", (True,)),
    },
    "message": {
        "annotations": FieldRule("a model reads no annotations", ([],)),
        "cache_control": FieldRule(_CACHE),
        "id": FieldRule(_HOSTED),
        "provider_specific_fields": FieldRule(_HOSTED),
    },
    "part": {
        "annotations": FieldRule("a model reads no annotations", ([],)),
        "cache_control": FieldRule(_CACHE),
        "prompt_cache_breakpoint": FieldRule(_CACHE),
        "logprobs": FieldRule("a model reads no log probabilities", ([],)),
    },
    "tool_call": {
        "cache_control": FieldRule(_CACHE),
        "provider_specific_fields": FieldRule(_HOSTED),
    },
    "tool": {"cache_control": FieldRule(_CACHE)},
    "responses.tool": {
        "cache_control": FieldRule(_CACHE),
        "output_schema": FieldRule("a tool's output is read as text"),
    },
    "structured_outputs": {
        "disable_fallback": FieldRule("there is no other backend to fall back to", (False,)),
    },
    "json_schema": {"description": FieldRule("the model does not see it; put it into the prompt")},
    "reasoning": {
        "summary": FieldRule("the whole reasoning is returned, not a summary"),
        "generate_summary": FieldRule("the whole reasoning is returned, not a summary"),
    },
    "item": {
        "phase": FieldRule("chat templates have no phases"),
        "cache_control": FieldRule(_CACHE),
        "encrypted_content": FieldRule("it is readable for its maker only"),
    },
    "messages.tool": {
        "cache_control": FieldRule(_CACHE),
        "eager_input_streaming": FieldRule("arguments are streamed as they are generated", (True,)),
    },
    "block": {
        "cache_control": FieldRule(_CACHE),
        "citations": FieldRule("a model reads no citations", ([], {"enabled": False})),
        "is_error": FieldRule(
            "chat templates have no mark for it; say so in the content", (False,)
        ),
        "data": FieldRule("it is readable for its maker only"),
    },
    "thinking": {
        "budget_tokens": FieldRule("the length of the reasoning cannot be limited"),
    },
}
"""Fields that are accepted and named in the response's `warnings`, by endpoint or object."""

_BEAMS = "there is no beam search"
_PROCESSORS = "requests cannot bring code; logit_bias and allowed_token_ids are supported"
_MEDIA = "only text is supported"
_NO_TEMPLATE_ARGUMENT = "give it inside chat_template_kwargs"

_REFUSED: Table = {
    "logits_processors": FieldRule(_PROCESSORS, ([],)),
    "logit_processors": FieldRule(_PROCESSORS, ([],)),
    "custom_logit_processor": FieldRule(_PROCESSORS, ("",)),
    "custom_params": FieldRule(_PROCESSORS, ({},)),
    "bad_words": FieldRule("logit_bias keeps single tokens out", ([],)),
    "use_beam_search": FieldRule(_BEAMS, (False,)),
    "length_penalty": FieldRule(_BEAMS, (1.0,)),
    "early_stopping": FieldRule(_BEAMS, (False,)),
    "repetition_detection": FieldRule("stop and max_tokens end an answer"),
    "stop_regex": FieldRule("give texts as stop", ("", [])),
    "no_stop_trim": FieldRule("give include_stop_str_in_output", (False,)),
    "spaces_between_special_tokens": FieldRule("text is as the tokenizer makes it", (True,)),
    "guided_whitespace_pattern": FieldRule("JSON is written with its usual white space"),
    "thinking_token_budget": FieldRule("the length of the reasoning cannot be limited", (-1,)),
    "thinking_budget": FieldRule("the length of the reasoning cannot be limited", (-1,)),
    "enable_thinking": FieldRule(_NO_TEMPLATE_ARGUMENT),
    "separate_reasoning": FieldRule("reasoning is separated where the model has a parser", (True,)),
    "stream_reasoning": FieldRule("give include_reasoning: false to leave it out", (True,)),
    "kv_transfer_params": FieldRule("there is one engine", ({},)),
    "vllm_xargs": FieldRule("there are no custom extensions", ({},)),
    "mm_processor_kwargs": FieldRule(_MEDIA, ({},)),
    "media_io_kwargs": FieldRule(_MEDIA, ({},)),
    "lora_path": FieldRule("there are no adapters"),
    "session_params": FieldRule("there are no sessions", ({},)),
    "return_hidden_states": FieldRule("they do not leave the engine", (False,)),
    "moderation": FieldRule("there is no moderation"),
}
"""Fields rejected by every endpoint that generates."""

_THINKING: Table = {"thinking": FieldRule("give chat_template_kwargs or reasoning_effort", ({},))}

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_REFUSED_MESSAGES: Table = {
    "container": FieldRule("there are no containers"),
    "mcp_servers": FieldRule("the server calls no tools itself; give tools", ([],)),
    "context_management": FieldRule("shorten the messages", ({}, {"edits": []}, _KEEP_ALL)),
    "output_format": FieldRule("give output_config.format"),
    "prompt": FieldRule("this endpoint takes messages"),
}
"""Fields rejected by Anthropic's endpoints."""

_REFUSED_RESPONSES: Table = {
    "conversation": FieldRule("there are no stored conversations; give previous_response_id"),
    "prompt": FieldRule("there are no stored prompts; give instructions and input"),
    "truncation": FieldRule("shorten the input", ("disabled",)),
    "messages": FieldRule("give input"),
    "response_format": FieldRule("give text.format"),
    "reasoning_effort": FieldRule("give reasoning.effort"),
}
"""Fields rejected by /v1/responses and /v1/responses/input_tokens."""

UNSUPPORTED: Mapping[str, Table] = {
    "chat": {
        **_REFUSED,
        **_THINKING,
        "prompt": FieldRule("this endpoint takes messages"),
        "reasoning": FieldRule("give reasoning_effort", ({},)),
        "audio": FieldRule(_MEDIA),
        "modalities": FieldRule(_MEDIA, (["text"], [])),
        "functions": FieldRule("give tools", ([],)),
        "function_call": FieldRule("give tool_choice", ("none", "auto")),
        "web_search_options": FieldRule("there is no web search"),
        "documents": FieldRule("put them into a message", ([],)),
        "verbosity": FieldRule("ask for it in a message", ("medium",)),
        "best_of": FieldRule("give n, or use /v1/completions", (1,)),
    },
    "completions": {
        **_REFUSED,
        **_THINKING,
        "messages": FieldRule("this endpoint takes prompt"),
        "suffix": FieldRule("text cannot be filled in before another", ("",)),
        "prompt_embeds": FieldRule("give text or token ids", ([],)),
        "tools": FieldRule("use /v1/chat/completions", ([],)),
        "reasoning_effort": FieldRule("use /v1/chat/completions"),
        "reasoning": FieldRule("use /v1/chat/completions", ({},)),
        "chat_template_kwargs": FieldRule("use /v1/chat/completions", ({},)),
    },
    "responses": {
        **_REFUSED,
        **_THINKING,
        **_REFUSED_RESPONSES,
        "background": FieldRule("an answer is generated while its request waits", (False,)),
        "context_management": FieldRule("shorten the input", ([],)),
        "previous_input_messages": FieldRule("give input"),
        "enable_response_messages": FieldRule("/tokenize shows a prompt", (False,)),
        "image": FieldRule(_MEDIA),
        "n": FieldRule("a response has one answer", (1,)),
    },
    "input_tokens": {
        **_REFUSED_RESPONSES,
        "personality": FieldRule("give instructions"),
    },
    "messages": {
        **_REFUSED,
        **_REFUSED_MESSAGES,
        "max_completion_tokens": FieldRule("give max_tokens"),
        "max_tokens_to_sample": FieldRule("give max_tokens"),
        "response_format": FieldRule("give output_config.format"),
        "reasoning_effort": FieldRule("give output_config.effort"),
        "n": FieldRule("a message has one answer", (1,)),
    },
    "count_tokens": _REFUSED_MESSAGES,
    "tokenize": {
        "documents": FieldRule("put them into a message", ([],)),
        "mm_processor_kwargs": FieldRule(_MEDIA, ({},)),
        "media_io_kwargs": FieldRule(_MEDIA, ({},)),
    },
    "detokenize": {},
    "message": {
        "audio": FieldRule(_MEDIA),
        "function_call": FieldRule("give tool_calls"),
        "prefix": FieldRule("give continue_final_message", (False,)),
    },
    "response_format": {
        "schema": FieldRule('give {"type": "json_schema", "json_schema": {"schema": ...}}'),
    },
    "structured_outputs": {
        "whitespace_pattern": FieldRule("JSON is written with its usual white space"),
        "structural_tag": FieldRule("give grammar"),
        "disable_any_whitespace": FieldRule("JSON is written with its usual white space", (False,)),
        "disable_additional_properties": FieldRule("say so in the schema", (False,)),
    },
    "responses.tool": {
        "defer_loading": FieldRule("all tools are in the prompt", (False,)),
        "allowed_callers": FieldRule("the model itself is the only caller", (["direct"], [])),
    },
    "reasoning": {
        "context": FieldRule("the chat template decides which reasoning is kept", ("auto",)),
        "mode": FieldRule("there is one mode", ("standard",)),
    },
    "text": {"verbosity": FieldRule("ask for it in the input", ("medium",))},
    "item": {
        "name": FieldRule("the call says which function it was"),
        "namespace": FieldRule("functions have no namespaces"),
        "caller": FieldRule("the model itself is the only caller", ({"type": "direct"},)),
    },
    "messages.tool": {
        "defer_loading": FieldRule("all tools are in the prompt", (False,)),
        "allowed_callers": FieldRule("the model itself is the only caller", (["direct"], [])),
        "input_examples": FieldRule("put them into the description", ([],)),
    },
    "block": {
        "caller": FieldRule("the model itself is the only caller", ({"type": "direct"},)),
        "toolset_name": FieldRule("there are no toolsets"),
    },
    "output_config": {
        "task_budget": FieldRule("give max_tokens"),
    },
}
"""Fields that are a 400 unless their value is neutral, by endpoint or object."""
