"""Another engine's greedy answers to the same prompts: from transformers, or from a server with
OpenAI's text completions and log probabilities."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from strobe.text.tokenizer import Tokenizer
from strobe.tools.verify.cases import Case
from strobe.tools.verify.reference import TransformersReference
from strobe.tools.verify.runs import TOP, Answer, Rows, Run

TIMEOUT = 600.0
"""Seconds that a server may take for one answer."""
_TOKEN_ID = re.compile(r"token_id:(\d+)")


class PeerUndecided(Exception):
    """The peer's answers cannot be compared; the text says why."""


class Peer(Protocol):
    """Another engine. name: of its run."""

    name: str

    def answer(self, case: Case) -> Answer:
        """Return its answer to one prompt. Raises PeerUndecided."""
        ...


class TransformersPeer:
    """transformers, which generates with its own cache, one row after another."""

    name = "transformers"

    def __init__(self, reference: TransformersReference, stop_ids: Sequence[int]):
        self.reference = reference
        self.stop_ids = frozenset(stop_ids)

    @torch.inference_mode()
    def answer(self, case: Case) -> Answer:
        model = self.reference.model
        ids = torch.tensor([case.prompt], device=self.reference.device)
        cache: Any = None
        tokens: list[int] = []
        rows: list[list[tuple[int, float]]] = []
        for _ in range(case.sampling.max_tokens or 0):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logits = output.logits[0, -1, : self.reference.vocab_size].float()
            values, top = logits.log_softmax(-1).topk(TOP)
            tokens.append(int(logits.argmax()))
            rows.append(list(zip(top.tolist(), values.tolist(), strict=True)))
            if tokens[-1] in self.stop_ids:
                break
            ids = torch.tensor([[tokens[-1]]], device=ids.device)
        return Answer(case=case, tokens=tuple(tokens), rows=to_rows(tokens, rows))


class ServerPeer:
    """A server at a URL."""

    def __init__(self, url: str, tokenizer: Tokenizer):
        """Raises ValueError if it does not answer."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = self.url
        self.tokenizer = tokenizer
        self._ids_of: dict[str, list[int]] = {}
        models = self._call("/v1/models")
        try:
            self.model = str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self.url}/v1/models names no model; is it an OpenAI server?"
            ) from None

    def answer(self, case: Case) -> Answer:
        body = {
            "model": self.model,
            "prompt": list(case.prompt),
            "max_tokens": case.sampling.max_tokens,
            "temperature": 0,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
        }
        reply = self._call("/v1/completions", body)
        choice = reply["choices"][0]
        tokens, rows = self._parse(choice)
        return Answer(case=case, tokens=tuple(tokens), rows=to_rows(tokens, rows))

    def _parse(self, choice: Mapping[str, Any]) -> tuple[list[int], list[list[tuple[int, float]]]]:
        """Return a choice's tokens, and the tokens and log probabilities that each row lists."""
        logprobs: Any = choice.get("logprobs")
        if not logprobs:
            raise PeerUndecided(f"{self.url} returns no log probabilities with its completions")
        if logprobs.get("content") is not None:  # llama.cpp's form
            tokens = [self._id(row) for row in logprobs["content"]]
            listed = [
                [
                    (self._id(entry), float(entry["logprob"]))
                    for entry in (row, *row["top_logprobs"])
                ]
                for row in logprobs["content"]
            ]
            return tokens, listed
        ids = choice.get("token_ids") or [self._id({"token": t}) for t in logprobs["tokens"]]
        listed = []
        tops = logprobs.get("top_logprobs") or [{}] * len(ids)
        for token, value, top in zip(ids, logprobs["token_logprobs"], tops, strict=False):
            others = [(self._known(text), float(v)) for text, v in (top or {}).items()]
            listed.append([(token, float(value)), *[(t, v) for t, v in others if t is not None]])
        return list(ids), listed

    def _id(self, entry: Mapping[str, Any]) -> int:
        """Return a token's id. Raises PeerUndecided if several tokens have its text."""
        if entry.get("id") is not None:
            return int(entry["id"])
        token = self._known(str(entry["token"]))
        if token is None:
            raise PeerUndecided(
                f"{self.url} returns tokens as text, and {entry['token']!r} is not one token's"
            )
        return token

    def _known(self, text: str) -> int | None:
        match = _TOKEN_ID.fullmatch(text)
        if match:
            return int(match[1])
        if not self._ids_of:
            for token in range(self.tokenizer.fast.get_vocab_size()):
                self._ids_of.setdefault(self.tokenizer.token_text(token), []).append(token)
        ids = self._ids_of.get(text, [])
        return ids[0] if len(ids) == 1 else None

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            detail = error.read().decode("utf-8", "replace")[:300]
            raise ValueError(f"{self.url}{path} answers {error.code}: {detail}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url}{path} cannot be read: {error}") from None


def to_rows(tokens: Sequence[int], listed: Sequence[Sequence[tuple[int, float]]]) -> Rows:
    """Return rows of log probabilities, each with its own token first if it is listed."""
    width = max((len(row) for row in listed), default=1)
    ids = np.zeros((len(tokens), width), dtype=np.int64)
    values = np.full((len(tokens), width), np.nan)
    for i, row in enumerate(listed):
        ordered = sorted(row, key=lambda entry: entry[0] != tokens[i])
        ids[i, : len(row)] = [token for token, _ in ordered]
        values[i, : len(row)] = [value for _, value in ordered]
    return Rows(ids, values)


def run_peer(peer: Peer, cases: Sequence[Case], stop_ids: Sequence[int]) -> Run:
    """Return the peer's answers one after the other ("alone") and, from a server, all at once
    ("batch"), without the tokens that end them."""
    answers = {"alone": [peer.answer(case) for case in cases]}
    began = time.perf_counter()
    if isinstance(peer, ServerPeer):
        with ThreadPoolExecutor(len(cases)) as pool:
            answers["batch"] = list(pool.map(peer.answer, cases))
    run = Run(answers, time.perf_counter() - began)
    return trimmed(run, stop_ids)


def trimmed(run: Run, stop_ids: Sequence[int]) -> Run:
    """Return a run whose answers lack the token that ended them, which not all engines report."""

    def trim(answer: Answer) -> Answer:
        if answer.tokens and answer.tokens[-1] in stop_ids:
            return replace(answer, tokens=answer.tokens[:-1], rows=answer.rows[:-1])
        return answer

    answers = {wave: [trim(answer) for answer in some] for wave, some in run.answers.items()}
    return Run(answers, run.seconds)
