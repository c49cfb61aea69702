"""A checkpoint's tokenizer: encoding, decoding and chat templates."""

from __future__ import annotations

import functools
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from strobe.text.chat_template import TemplateCapabilities, adapt, probe_template

Message = Mapping[str, Any]

UNTRUSTED_ROLES = "user", "tool"
"""Roles whose messages come from outside: special tokens spelled there are plain text."""


class RenderedChat(NamedTuple):
    """A conversation rendered by the chat template.

    marked: the text with one private-use character in place of each special token that a message of
    UNTRUSTED_ROLES spells. spelled: the special token of each such character. warnings: a sentence
    for each message that the template does not take where it is."""

    text: str
    marked: str
    spelled: Mapping[str, str]
    warnings: tuple[str, ...] = ()


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Raises ValueError if it cannot be read."""

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer  # slow to import, and only needed here
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        hint = "download or save the checkpoint again."
        if not any((directory / name).exists() for name in ("tokenizer.json", "vocab.json")):
            raise ValueError(f"{directory / 'tokenizer.json'} does not exist; {hint}")
        self.byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.token_text = functools.lru_cache(1 << 16)(self._token_text)
        self._probe = functools.lru_cache(16)(self._probe_template)
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            self.fast: FastTokenizer = self.hf.backend_tokenizer
            self.fast.no_truncation()
            self.fast.no_padding()
        except Exception as error:
            raise ValueError(
                f"{directory} has no tokenizer that can be read ({_one_line(error)}); {hint}"
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to token ids, adding special tokens as the checkpoint says. Raises
        ValueError."""
        if not isinstance(text, str):
            raise ValueError(f"A prompt is {reprlib.repr(text)}, but must be a text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"A prompt holds {text[error.start]!r}, half a character, at place {error.start}; "
                "give whole Unicode characters."
            ) from None
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be part of a character: vocabularies write such a byte
        as <0xNN>, or as the character that byte-level BPE maps it to (Radford et al., 2019)."""
        text = self.token_text(token)
        written = self.fast.id_to_token(token) or ""
        if "\ufffd" in text and (single := re.fullmatch("<0x([0-9A-F]{2})>", written)):
            return bytes.fromhex(single[1])
        if "\ufffd" in text and self.byte_of.keys() >= set(written):
            return bytes(self.byte_of[character] for character in written)
        return text.encode("utf-8", "replace")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _token_text(self, token: int) -> str:
        """Decode a single token, special or not."""
        return self.fast.decode([token], skip_special_tokens=False)

    def chat_text(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of `render`."""
        return self.render(messages, **options).text

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> RenderedChat:
        """Render a conversation by the chat template, ready for the assistant to answer.

        Raises ValueError for invalid messages or tools, and if there is no template or it rejects
        them.
        """
        for name in ("conversation", "tokenize"):
            if name in template_options:
                raise ValueError(f"{name} is no option of the chat template; leave it out.")
        template_options.setdefault("add_generation_prompt", True)
        conversation = _conversation(messages)
        functions = _tools(tools)
        if chat_template is None and self.hf.chat_template is None:
            raise ValueError("The checkpoint has no chat template; give one as chat_template.")
        shielded, spelled = self._escape_special_tokens(conversation)
        adapted = adapt(shielded, functions, self.capabilities(chat_template))
        try:
            marked = self._apply(adapted.messages, adapted.tools, chat_template, template_options)
        except Exception as error:
            reason = _one_line(error)
            raise ValueError(f"The chat template rejects these messages: {reason}.") from error
        text = marked.translate(str.maketrans(dict(spelled)))
        return RenderedChat(text=text, marked=marked, spelled=spelled, warnings=adapted.warnings)

    def capabilities(self, chat_template: str | None = None) -> TemplateCapabilities:
        """Return what a chat template reads, None for the checkpoint's; it is probed once."""
        return self._probe(chat_template, str(self.hf.chat_template))

    def _probe_template(self, chat_template: str | None, own: str) -> TemplateCapabilities:
        """Probe a chat template. own: the checkpoint's template, which may change under a cache."""
        options = {"add_generation_prompt": False}
        return probe_template(
            lambda messages, tools: self._apply(messages, tools, chat_template, options)
        )

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        chat_template: str | None,
        options: Mapping[str, Any],
    ) -> str:
        """Return the text of a chat template."""
        if any(message.get("content", "") is None for message in messages):
            return self._apply_with_nulls(messages, tools, chat_template, options)
        return self.hf.apply_chat_template(
            messages, tools=tools, chat_template=chat_template, tokenize=False, **options
        )

    def _apply_with_nulls(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        chat_template: str | None,
        options: Mapping[str, Any],
    ) -> str:
        """Return the text of a chat template that tests for content that is null, which newer
        versions of `apply_chat_template` drop."""
        from transformers.utils import chat_template_utils

        render = getattr(chat_template_utils, "render_jinja_template", None)
        if render is None:
            return self.hf.apply_chat_template(
                messages, tools=tools, chat_template=chat_template, tokenize=False, **options
            )
        (text,), _ = render(
            conversations=[messages],
            tools=tools,
            chat_template=self.hf.get_chat_template(chat_template, tools),
            **{**self.hf.special_tokens_map, **options},
        )
        return text

    def encode_chat(self, chat: RenderedChat, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a rendered conversation to token ids. Raises ValueError."""
        if not chat.spelled:
            return self.encode(chat.text, add_special_tokens=add_special_tokens)
        ids = self.encode("", add_special_tokens=add_special_tokens)
        plain = self._plain_tokenizer
        for part in re.split(f"([{''.join(chat.spelled)}])", chat.marked):
            if part in chat.spelled:
                ids += plain.encode(chat.spelled[part], add_special_tokens=False).ids
            else:
                ids += self.encode(part, add_special_tokens=False)
        return ids

    def render_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Render and encode a conversation."""
        return self.encode_chat(self.render(messages, **options))

    @functools.cached_property
    def _plain_tokenizer(self) -> FastTokenizer:
        """A copy of the tokenizer that encodes special tokens as text."""
        plain = FastTokenizer.from_str(self.fast.to_str())
        plain.encode_special_tokens = True
        return plain

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        tokens = self.fast.get_added_tokens_decoder().values()
        texts = sorted([token.content for token in tokens if token.special], key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def _escape_special_tokens(
        self, conversation: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Replace special tokens in messages of UNTRUSTED_ROLES by characters that occur in no
        message; return the messages, and the special token of each character."""
        untrusted = [m["content"] for m in conversation if m["role"] in UNTRUSTED_ROLES]
        matches = [self._special_pattern.findall(text) for text in untrusted if text]
        special_tokens = sorted({token for tokens in matches for token in tokens})
        if not special_tokens:
            return conversation, {}
        used = set(json.dumps(conversation, ensure_ascii=False, default=str))
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
        marks = dict(zip(special_tokens, free, strict=False))
        shielded = [self._shield(message, marks) for message in conversation]
        return shielded, {mark: token for token, mark in marks.items()}

    def _shield(self, message: dict[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
        """Replace special tokens in a message of UNTRUSTED_ROLES by their marks."""
        if message["role"] not in UNTRUSTED_ROLES or not message["content"]:
            return message
        text = self._special_pattern.sub(lambda token: marks[token[0]], message["content"])
        return {**message, "content": text}


def _one_line(error: Exception) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split()).rstrip(".")


def _conversation(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise ValueError(
            f"A conversation is {reprlib.repr(messages)}, but must be a list of messages."
        )
    if not messages:
        raise ValueError("The conversation is empty; give it at least one message.")
    return [_message(message) for message in messages]


def _message(message: object) -> dict[str, Any]:
    """Return the message with its content as one text: templates ignore other types, so text parts
    are joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"A message is {reprlib.repr(message)}, but must be an object with role and content."
        )
    content = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = content
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"A message holds the part {reprlib.repr(part)}, but only text parts are "
                    'supported; give {"type": "text", "text": ...}.'
                )
        content = "\n".join(part["text"] for part in parts)
    may_be_empty = message["role"] in ("assistant", "tool")
    if not isinstance(content, str) and not (content is None and may_be_empty):
        raise ValueError(
            f"The content of a message is {reprlib.repr(content)}, but must be a text, or a list "
            "of text parts."
        )
    return {**message, "content": content}


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise ValueError(f"tools is {reprlib.repr(tools)}, but must be a list of objects.")
    return [dict(tool) for tool in tools]
