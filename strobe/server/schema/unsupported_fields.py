"""Request fields that the server ignores or rejects, each with its reason.

docs/api.md shows these tables. Their keys are endpoints and objects inside a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strobe.sampling_params import FILTERS


@dataclass(frozen=True)
class FieldRule:
    """Why a field is ignored or rejected. neutral_values: values that change nothing, accepted
    without a warning."""

    reason: str
    neutral_values: tuple[Any, ...] = ()

    def is_neutral(self, value: object) -> bool:
        """Whether a value is neutral; true and 1 are different values."""
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral_values
        )


Table = Mapping[str, FieldRule]

_HOSTED = "only hosted services use it"
_CACHE = "prefix caching is automatic"

_ACCEPTED: Table = {
    "user": FieldRule(_HOSTED),
    "metadata": FieldRule("nothing is stored", ({},)),
    "store": FieldRule("nothing is stored", (False,)),
    "service_tier": FieldRule("there is only one tier", ("auto", "default", "standard_only")),
    "safety_identifier": FieldRule(_HOSTED),
    "access_programs": FieldRule(_HOSTED),
    "prompt_cache_key": FieldRule(_CACHE),
    "prompt_cache_retention": FieldRule(_CACHE),
    "prompt_cache_options": FieldRule(_CACHE, ({},)),
    "guided_decoding_backend": FieldRule("llguidance is the only backend"),
    "rid": FieldRule("use request_id"),
    "session_id": FieldRule(_CACHE),
    "cache_prompt": FieldRule(_CACHE, (True,)),
    "id_slot": FieldRule(_CACHE, (-1,)),
    "keep_alive": FieldRule("the model stays loaded"),
    "provider": FieldRule("there is only one server"),
    "usage": FieldRule(
        "responses always report usage; streams do with stream_options.include_usage", ({},)
    ),
    "log_metrics": FieldRule("/metrics counts every request"),
    "data_parallel_rank": FieldRule("the server chooses the engine"),
    "timings_per_token": FieldRule("include_speculation reports each step", (False,)),
    "return_progress": FieldRule("prefill progress is not reported", (False,)),
    "stream_interval": FieldRule("every step is streamed as soon as it ends", (1,)),
    "xtc_threshold": FieldRule("there is no XTC sampler"),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        FieldRule("there is no DRY sampler"),
    ),
    "mirostat_tau": FieldRule("there is no mirostat sampler"),
    "mirostat_eta": FieldRule("there is no mirostat sampler"),
}
"""Fields that every generating endpoint ignores."""

_ACCEPTED_MESSAGES: Table = {
    "cache_control": FieldRule(_CACHE),
    "speed": FieldRule("there is only one speed", ("standard",)),
    "inference_geo": FieldRule("there is only one server"),
    "diagnostics": FieldRule("usage reports prefix cache hits", ({},)),
    "user_profile_id": FieldRule(_HOSTED),
    "workspace_id": FieldRule(_HOSTED),
}
"""Fields that Anthropic's endpoints ignore."""

_ACCEPTED_RESPONSES: Table = {
    "client_metadata": FieldRule(_HOSTED),
    "prompt": FieldRule("there are no stored prompts; use instructions and input", ({},)),
}
"""Fields that /v1/responses and /v1/responses/input_tokens ignore."""

_ACCEPTED_OLLAMA: Table = {
    "keep_alive": FieldRule("the model stays loaded"),
    "truncate": FieldRule("a prompt that does not fit is an error", (False,)),
    "shift": FieldRule("an answer that fills the context ends there", (False,)),
}
"""Fields that Ollama's endpoints ignore."""

_RUNNER = (
    "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap",
    "use_mlock",
)  # fmt: skip
"""Ollama's options for loading a model."""

NO_EFFECT: Mapping[str, Table] = {
    "chat": {
        **_ACCEPTED,
        "prediction": FieldRule("drafts come from the server's own drafter"),
    },
    "completions": _ACCEPTED,
    "infill": {
        **_ACCEPTED,
        "samplers": FieldRule("the order of the samplers is fixed"),
        "n_indent": FieldRule("lines may have any indentation"),
        "t_max_prompt_ms": FieldRule("use timeout"),
        "t_max_predict_ms": FieldRule("use timeout or n_predict"),
        "response_fields": FieldRule("the response is always complete"),
    },
    "infill.file": {"time": FieldRule("files keep their order")},
    "responses": {
        **{name: rule for name, rule in _ACCEPTED.items() if name not in ("metadata", "store")},
        "max_tool_calls": FieldRule("it limits built-in tools, which this server does not have"),
        **_ACCEPTED_RESPONSES,
    },
    "messages": {**_ACCEPTED, **_ACCEPTED_MESSAGES},
    "count_tokens": _ACCEPTED_MESSAGES,
    "input_tokens": _ACCEPTED_RESPONSES,
    "stream_options": {
        "include_obfuscation": FieldRule("chunks are not padded", (False,)),
    },
    "responses.stream_options": {
        "include_obfuscation": FieldRule("chunks are not padded", (False,)),
        "include_usage": FieldRule("the last event always carries the usage", (True,)),
    },
    "message": {
        "annotations": FieldRule("models do not read annotations", ([],)),
        "cache_control": FieldRule(_CACHE),
        "id": FieldRule(_HOSTED),
        "provider_specific_fields": FieldRule(_HOSTED),
    },
    "part": {
        "annotations": FieldRule("models do not read annotations", ([],)),
        "cache_control": FieldRule(_CACHE),
        "prompt_cache_breakpoint": FieldRule(_CACHE),
        "logprobs": FieldRule("models do not read log probabilities", ([],)),
    },
    "tool_call": {
        "cache_control": FieldRule(_CACHE),
        "provider_specific_fields": FieldRule(_HOSTED),
    },
    "tool": {"cache_control": FieldRule(_CACHE)},
    "responses.tool": {
        "cache_control": FieldRule(_CACHE),
        "output_schema": FieldRule("tool outputs are read as plain text"),
    },
    "structured_outputs": {
        "disable_fallback": FieldRule("there is no other backend to fall back to", (False,)),
    },
    "json_schema": {"description": FieldRule("the model does not see it; put it into the prompt")},
    "reasoning": {
        "summary": FieldRule("the full reasoning is returned"),
        "generate_summary": FieldRule("the full reasoning is returned"),
    },
    "item": {
        "phase": FieldRule("chat templates have no phases"),
        "cache_control": FieldRule(_CACHE),
        "encrypted_content": FieldRule("only the service that created it can read it"),
    },
    "messages.tool": {
        "cache_control": FieldRule(_CACHE),
        "eager_input_streaming": FieldRule("arguments are streamed as they are generated", (True,)),
    },
    "block": {
        "cache_control": FieldRule(_CACHE),
        "citations": FieldRule("models do not read citations", ([], {"enabled": False})),
        "is_error": FieldRule("chat templates cannot express it; say so in the content", (False,)),
        "data": FieldRule("only the service that created it can read it"),
    },
    "batches": {
        "completion_window": FieldRule("a batch has no deadline", ("24h",)),
        "output_expires_after": FieldRule("files stay until they are deleted"),
    },
    "ollama.chat": _ACCEPTED_OLLAMA,
    "ollama.generate": _ACCEPTED_OLLAMA,
    "ollama.show": {"verbose": FieldRule("the answer is always the same", (False,))},
    "options": {
        **dict.fromkeys(_RUNNER, FieldRule("the server's options set it")),
        "num_keep": FieldRule("no token is dropped from the context"),
        "mirostat_tau": FieldRule("there is no mirostat sampler"),
        "mirostat_eta": FieldRule("there is no mirostat sampler"),
    },
}
"""Fields that are ignored and listed in the response's `warnings`, by endpoint or object."""

_BEAMS = "there is no beam search"
_FILTERS = ", ".join(option.name for option in FILTERS)
_SAMPLERS = f"the samplers are temperature, {_FILTERS} and penalties"
_PROCESSORS = "requests cannot run code here; use logit_bias or allowed_token_ids"
_MEDIA = "only text is supported"
_NO_TEMPLATE_ARGUMENT = "put it into chat_template_kwargs"

_REFUSED: Table = {
    "logits_processors": FieldRule(_PROCESSORS, ([],)),
    "logit_processors": FieldRule(_PROCESSORS, ([],)),
    "custom_logit_processor": FieldRule(_PROCESSORS, ("",)),
    "custom_params": FieldRule(_PROCESSORS, ({},)),
    "use_beam_search": FieldRule(_BEAMS, (False,)),
    "length_penalty": FieldRule(_BEAMS, (1.0,)),
    "typical_p": FieldRule(_SAMPLERS, (1,)),
    "tfs_z": FieldRule(_SAMPLERS, (1,)),
    "top_a": FieldRule(_SAMPLERS, (0,)),
    "top_n_sigma": FieldRule(_SAMPLERS, (-1, 0)),
    "xtc_probability": FieldRule(_SAMPLERS, (0,)),
    "dry_multiplier": FieldRule(_SAMPLERS, (0,)),
    "dynatemp_range": FieldRule(_SAMPLERS, (0,)),
    "mirostat": FieldRule(_SAMPLERS, (0,)),
    "n_predict": FieldRule("use max_tokens", (-1,)),
    "n_probs": FieldRule("use logprobs", (0,)),
    "early_stopping": FieldRule(_BEAMS, (False,)),
    "stop_regex": FieldRule("use stop, which takes plain strings", ("", [])),
    "no_stop_trim": FieldRule("use include_stop_str_in_output", (False,)),
    "spaces_between_special_tokens": FieldRule("the tokenizer determines the spaces", (True,)),
    "guided_whitespace_pattern": FieldRule("JSON whitespace cannot be configured"),
    "thinking_budget": FieldRule("use thinking_token_budget", (-1,)),
    "enable_thinking": FieldRule(_NO_TEMPLATE_ARGUMENT),
    "separate_reasoning": FieldRule("reasoning is separated if the model has a parser", (True,)),
    "stream_reasoning": FieldRule("use include_reasoning: false to leave it out", (True,)),
    "kv_transfer_params": FieldRule("there is only one engine", ({},)),
    "vllm_xargs": FieldRule("there are no custom extensions", ({},)),
    "mm_processor_kwargs": FieldRule(_MEDIA, ({},)),
    "media_io_kwargs": FieldRule(_MEDIA, ({},)),
    "lora_path": FieldRule("there are no adapters"),
    "session_params": FieldRule("there are no sessions", ({},)),
    "return_hidden_states": FieldRule("hidden states are not returned", (False,)),
    "moderation": FieldRule("there is no moderation"),
}
"""Fields that every generating endpoint rejects."""

_NAMED_IDS: Table = {
    "logprob_token_ids": FieldRule("use /v1/chat/completions or /v1/completions", ([],))
}
_THINKING: Table = {"thinking": FieldRule("use chat_template_kwargs or reasoning_effort", ({},))}

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_REFUSED_MESSAGES: Table = {
    "container": FieldRule("there are no containers"),
    "mcp_servers": FieldRule("the server does not call tools itself; use tools", ([],)),
    "context_management": FieldRule("shorten the messages", ({}, {"edits": []}, _KEEP_ALL)),
    "output_format": FieldRule("use output_config.format"),
    "prompt": FieldRule("this endpoint takes messages"),
}
"""Fields that Anthropic's endpoints reject."""

_REFUSED_RESPONSES: Table = {
    "conversation": FieldRule("there are no stored conversations; use previous_response_id"),
    "truncation": FieldRule("shorten the input", ("disabled",)),
    "messages": FieldRule("use input"),
    "response_format": FieldRule("use text.format"),
    "reasoning_effort": FieldRule("use reasoning.effort"),
}
"""Fields that /v1/responses and /v1/responses/input_tokens reject."""

UNSUPPORTED: Mapping[str, Table] = {
    "chat": {
        **_REFUSED,
        **_THINKING,
        "prompt": FieldRule("this endpoint takes messages"),
        "reasoning": FieldRule("use reasoning_effort", ({},)),
        "audio": FieldRule(_MEDIA),
        "modalities": FieldRule(_MEDIA, (["text"], [])),
        "functions": FieldRule("use tools", ([],)),
        "function_call": FieldRule("use tool_choice", ("none", "auto")),
        "web_search_options": FieldRule("there is no web search"),
        "documents": FieldRule("put them into a message", ([],)),
        "verbosity": FieldRule("ask for it in a message", ("medium",)),
        "best_of": FieldRule("use n, or /v1/completions", (1,)),
    },
    "completions": {
        **_REFUSED,
        **_THINKING,
        "messages": FieldRule("this endpoint takes prompt"),
        "prompt_embeds": FieldRule("use text or token ids", ([],)),
        "tools": FieldRule("use /v1/chat/completions", ([],)),
        "reasoning_effort": FieldRule("use /v1/chat/completions"),
        "reasoning": FieldRule("use /v1/chat/completions", ({},)),
        "chat_template_kwargs": FieldRule("use /v1/chat/completions", ({},)),
    },
    "infill": {
        **{name: rule for name, rule in _REFUSED.items() if name != "n_predict"},
        **_NAMED_IDS,
        "n": FieldRule("there is one answer", (1,)),
        "n_probs": FieldRule("use /v1/completions", (0,)),
        "logprobs": FieldRule("use /v1/completions", (False,)),
        "grammar": FieldRule("use ebnf", ("",)),
        "repeat_last_n": FieldRule("repeat_penalty counts all tokens", (-1,)),
    },
    "responses": {
        **_REFUSED,
        **_NAMED_IDS,
        **_THINKING,
        **_REFUSED_RESPONSES,
        "background": FieldRule("a request always waits for its answer", (False,)),
        "context_management": FieldRule("shorten the input", ([],)),
        "previous_input_messages": FieldRule("use input"),
        "enable_response_messages": FieldRule("use /tokenize to see the prompt", (False,)),
        "image": FieldRule(_MEDIA),
        "n": FieldRule("a response has one answer", (1,)),
    },
    "input_tokens": {
        **_REFUSED_RESPONSES,
        "personality": FieldRule("use instructions"),
    },
    "messages": {
        **_REFUSED,
        **_NAMED_IDS,
        **_REFUSED_MESSAGES,
        "max_completion_tokens": FieldRule("use max_tokens"),
        "max_tokens_to_sample": FieldRule("use max_tokens"),
        "response_format": FieldRule("use output_config.format"),
        "reasoning_effort": FieldRule("use output_config.effort"),
        "n": FieldRule("a message has one answer", (1,)),
    },
    "count_tokens": _REFUSED_MESSAGES,
    "tokenize": {
        "documents": FieldRule("put them into a message", ([],)),
        "mm_processor_kwargs": FieldRule(_MEDIA, ({},)),
        "media_io_kwargs": FieldRule(_MEDIA, ({},)),
    },
    "message": {
        "audio": FieldRule(_MEDIA),
        "function_call": FieldRule("use tool_calls"),
        "prefix": FieldRule("use continue_final_message", (False,)),
    },
    "triggered_tags": {
        "at_least_one": FieldRule("an answer may have any number of tags", (False,)),
        "stop_after_first": FieldRule("an answer may have any number of tags", (False,)),
        "excludes": FieldRule("use bad_words", ([],)),
    },
    "response_format": {
        "schema": FieldRule('use {"type": "json_schema", "json_schema": {"schema": ...}}'),
    },
    "structured_outputs": {
        "whitespace_pattern": FieldRule("JSON whitespace cannot be configured"),
        "disable_any_whitespace": FieldRule("JSON whitespace cannot be configured", (False,)),
        "disable_additional_properties": FieldRule("say so in the schema", (False,)),
    },
    "responses.tool": {
        "defer_loading": FieldRule("all tools are in the prompt", (False,)),
        "allowed_callers": FieldRule("the model itself is the only caller", (["direct"], [])),
    },
    "reasoning": {
        "context": FieldRule("the chat template decides which reasoning to keep", ("auto",)),
        "mode": FieldRule("there is only one mode", ("standard",)),
    },
    "text": {"verbosity": FieldRule("ask for it in the input", ("medium",))},
    "item": {
        "name": FieldRule("call_id already identifies the call"),
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
        "task_budget": FieldRule("use max_tokens"),
    },
    "ollama.chat": {"prompt": FieldRule("use messages, or /api/generate", ("",))},
    "ollama.generate": {
        "messages": FieldRule("use prompt, or /api/chat", ([],)),
        "context": FieldRule("send the conversation to /api/chat", ([],)),
        "template": FieldRule("write the whole prompt and set raw", ("",)),
        "suffix": FieldRule("use /v1/completions", ("",)),
        "images": FieldRule(_MEDIA, ([],)),
        "width": FieldRule(_MEDIA, (0,)),
        "height": FieldRule(_MEDIA, (0,)),
        "steps": FieldRule(_MEDIA, (0,)),
    },
    "ollama.show": {
        "system": FieldRule("the answer describes the model alone", ("",)),
        "template": FieldRule("the answer describes the model alone", ("",)),
        "options": FieldRule("the answer describes the model alone", ({},)),
    },
    "ollama.message": {"images": FieldRule(_MEDIA, ([],))},
    "options": {
        **dict.fromkeys(("typical_p", "tfs_z"), FieldRule(_SAMPLERS, (1,))),
        "mirostat": FieldRule(_SAMPLERS, (0,)),
        "repeat_last_n": FieldRule("repeat_penalty counts all tokens", (-1,)),
        "penalize_newline": FieldRule("penalties count all tokens", (True,)),
    },
}
"""Fields that are rejected unless their value is neutral, by endpoint or object."""
