"""`strobe verify --against`: other engines, as small servers that repeat prepared answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.sampling_params import SamplingParams
from strobe.text.tokenizer import Tokenizer
from strobe.tools.verify.against import PeerUndecided, ServerPeer, TransformersPeer, run_peer
from strobe.tools.verify.cases import Case
from strobe.tools.verify.check import Checker
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.judge import Judge
from strobe.tools.verify.reference import TransformersReference, make_reference
from strobe.tools.verify.rounding import Rounding
from strobe.tools.verify.runs import Answer, Run, run_cases
from strobe.tools.verify.verify import make_engine
from strobe.tools.verify.verify_settings import VerifySettings

Reply = Callable[[Answer], dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(locate_models(EngineConfig(device="cpu", max_model_len=128)))


@pytest.fixture(scope="module")
def reference(engine: Engine) -> TransformersReference:
    made, _ = make_reference("transformers", engine)
    assert isinstance(made, TransformersReference)
    return made


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer(Path(engine.config.target))


@pytest.fixture(scope="module")
def ours(engine: Engine, tokenizer: Tokenizer) -> list[Answer]:
    texts = ("Take the list pear, fig and write it in reverse order.", "What is 3 + 4?")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    cases = [
        Case("chat", tuple(tokenizer.render_chat([{"role": "user", "content": text}])), params)
        for text in texts
    ]
    return run_cases(engine, cases, speculate=False)


def vllm_form(answer: Answer) -> dict[str, Any]:
    rows = list(zip(answer.rows.tokens.tolist(), answer.rows.values.tolist(), strict=True))
    return {
        "tokens": [f"token_id:{token}" for token in answer.tokens],
        "token_logprobs": [values[0] for _, values in rows],
        "top_logprobs": [
            {f"token_id:{token}": value for token, value in zip(ids, values, strict=True)}
            for ids, values in rows
        ],
    }


def llama_cpp_form(answer: Answer) -> dict[str, Any]:
    rows = list(zip(answer.rows.tokens.tolist(), answer.rows.values.tolist(), strict=True))
    return {
        "content": [
            {
                "id": token,
                "token": "?",
                "logprob": values[0],
                "top_logprobs": [
                    {"id": other, "token": "?", "logprob": value}
                    for other, value in zip(ids[1:], values[1:], strict=True)
                ],
            }
            for token, (ids, values) in zip(answer.tokens, rows, strict=True)
        ]
    }


@contextmanager
def serving(answers: Sequence[Answer], form: Reply | None) -> Generator[str]:
    """Serve prepared answers, by prompt; form: of their log probabilities, None for none."""
    by_prompt = {answer.case.prompt: answer for answer in answers}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "prepared"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = by_prompt[tuple(body["prompt"])]
            logprobs = None if form is None else form(answer)
            self._send({"choices": [{"text": "", "logprobs": logprobs}]})

        def _send(self, reply: Mapping[str, Any]) -> None:
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("form", [vllm_form, llama_cpp_form])
def test_server_peer_reads_tokens_and_logprobs(
    ours: list[Answer], tokenizer: Tokenizer, form: Reply
):
    with serving(ours, form) as url:
        run = run_peer(ServerPeer(url, tokenizer), [answer.case for answer in ours], ())
    for wave in ("alone", "batch"):
        assert [answer.tokens for answer in run.answers[wave]] == [a.tokens for a in ours]
        assert run.answers[wave][0].rows.values[:, 0] == pytest.approx(ours[0].rows.values[:, 0])


def test_server_without_logprobs_is_undecided(ours: list[Answer], tokenizer: Tokenizer):
    with serving(ours, None) as url, pytest.raises(PeerUndecided, match="no log probabilities"):
        run_peer(ServerPeer(url, tokenizer), [ours[0].case], ())


def test_transformers_peer_gives_the_same_answers(
    ours: list[Answer], engine: Engine, reference: TransformersReference
):
    peer = TransformersPeer(reference, engine.resolved.target.eos_ids)
    assert peer.answer(ours[0].case).tokens == ours[0].tokens


def test_reference_reuses_the_rows_that_two_sequences_share(
    engine: Engine, reference: TransformersReference, ours: list[Answer]
):
    prompt = ours[0].case.prompt
    longer = [*prompt, *ours[0].tokens]
    computed: list[int] = []
    forward = reference.model.forward

    def counted(*args: Any, **fields: Any) -> Any:
        computed.append(fields["input_ids"].shape[1])
        return forward(*args, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.model, "forward", counted)
        reference.logits([*prompt, 5, 6, 7], len(prompt))
        reused = reference.logits(longer, len(prompt))
    assert computed[1] == len(ours[0].tokens)  # the prompt's last row and the answer's but its last
    fresh = TransformersReference(engine.resolved).logits(longer, len(prompt))
    assert np.abs(reused - fresh).max() < 1e-4  # of logits that spread over 30; measured 2e-5


def test_reference_loads_without_a_progress_bar(engine: Engine, capfd: pytest.CaptureFixture[str]):
    TransformersReference(engine.resolved)
    assert "Loading weights" not in capfd.readouterr().err


def judged(
    engine: Engine,
    reference: TransformersReference,
    tokenizer: Tokenizer,
    ours: list[Answer],
    other: list[Answer],
) -> Verification:
    verification = Verification(target="target", draft=None)
    judge = Judge(
        verification=verification,
        tokenizer=tokenizer,
        rounding=Rounding(rows=1, by_shape={}, largest=0.0, bound=1e-3, limit=1e-2),
        reference_bound=1e-3,
    )
    checker = Checker(reference, engine)
    judge.judge_runs(checker, Run({"chat": ours}, 1.0), Run({"chat": other}, 1.0), "peer")
    return verification


def test_divergence_beyond_a_tie_is_a_fault(
    engine: Engine, reference: TransformersReference, tokenizer: Tokenizer, ours: list[Answer]
):
    assert judged(engine, reference, tokenizer, ours, ours).verdict == "clean"
    wrong = list(ours[0].tokens)
    wrong[3] = wrong[3] + 1
    altered = [Answer(ours[0].case, tuple(wrong), ours[0].rows), *ours[1:]]
    verification = judged(engine, reference, tokenizer, ours, altered)
    assert verification.exit_status == 1
    (divergence,) = verification.divergences
    assert divergence["label"] == "fault"
    assert divergence["position"] == 3
    assert divergence["margin"] > divergence["bound"]


def test_against_something_else_is_a_mistake():
    with pytest.raises(ValueError, match="against is 'vllm', but must be transformers or a URL"):
        VerifySettings(against="vllm")
