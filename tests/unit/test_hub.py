"""Names on the hub: what is asked of it, what a user is told, and a cache without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from textpair import Pair

from strobe import LLM
from strobe.names.hub import directory

NAME, COMMIT = "owner/tiny-model", "a" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """hub(answer) -> the calls of snapshot_download from then on; answer is returned or raised."""

    def answering(answer: Any) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def download(name: str, **options: Any) -> Any:
            calls.append({"name": name, **options})
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return answering


def http(kind: type[Exception], status: int) -> Exception:
    """An error as the hub's client raises it, over several lines."""
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))
    made: Any = kind
    return made("Client Error.\n\nA page of explanations.", response=response)


def sentence(name: str, revision: str | None = None) -> str:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        directory(name, revision)
    said = str(caught.value)
    assert "\n" not in said
    assert name.partition("@")[0] in said
    return said


@pytest.mark.parametrize(
    ("given", "revision", "asked"),
    [
        (NAME, None, None),
        (f"{NAME}@v1.0", None, "v1.0"),
        (NAME, "main", "main"),
        (f"{NAME}@main", "main", "main"),
    ],
)
def test_a_hub_name_is_asked_for_at_its_revision(
    hub: Callable[..., Any], given: str, revision: str | None, asked: str | None
):
    calls = hub("/cache/found")
    assert directory(given, revision) == "/cache/found"
    assert [(call["name"], call["revision"]) for call in calls] == [(NAME, asked)]


def test_only_the_files_that_are_read_are_asked_for(hub: Callable[..., Any]):
    calls = hub("/cache/found")
    directory(NAME, None)
    (call,) = calls
    published = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "vocab.json", "merges.txt", "README.md", "dflash.py",
        "pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "q4.gguf",
        "original/model.safetensors", "metal/model.bin", "onnx/model.onnx", "flax_model.msgpack",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        published, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
    )
    assert list(kept) == published[:10]


def test_a_local_directory_wins(
    hub: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = hub("/cache/found")
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert directory(NAME, None) == NAME
    assert "is a directory, not a name" in sentence(NAME, "main")
    for path in ("/nowhere/model", "model", "../a/b", "~/models/b", "a/b/c"):
        assert directory(path, None) == path  # whoever reads its config.json says what is wrong
    assert not calls


def test_two_revisions_are_one_too_many(hub: Callable[..., Any]):
    hub("/cache/found")
    said = sentence(f"{NAME}@v1", "v2")
    assert "names the revision 'v1', but revision is 'v2'" in said


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (http(errors.GatedRepoError, 403), "is gated: accept its terms on its page"),
        (http(errors.RepositoryNotFoundError, 404), "neither a directory here nor a model on the"),
        (http(errors.RevisionNotFoundError, 404), "has no revision 'v9'; name a branch"),
        (http(errors.HfHubHTTPError, 503), "could not be downloaded (HfHubHTTPError: Client Err"),
        (errors.HFValidationError("no name"), "nor a possible name on the hub"),
        (errors.LocalEntryNotFoundError("gone"), "the Hugging Face hub cannot be reached"),
        (OSError(28, "No space left on device"), "No space left on device); try again"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    hub: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception, part: str
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub(error)
    assert part in sentence(NAME, "v9")


def test_ctrl_c_during_a_download_is_no_error_of_the_hub(hub: Callable[..., Any]):
    hub(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        directory(NAME, None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Path]:
    """cache(name, directory) -> the snapshot, in the layout that the hub's client keeps; tests
    have HF_HUB_OFFLINE set."""
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name: str, source: Path) -> Path:
        kept = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = kept / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(COMMIT)
        for file in source.iterdir():
            (snapshot / file.name).symlink_to(file)
        return snapshot

    return put


def test_a_pair_in_the_cache_runs_without_a_network(
    cache: Callable[[str, Path], Path], pair: Pair, main: Callable[..., Any]
):
    snapshot = cache("owner/target", pair.target)
    cache("owner/draft", pair.draft)
    llm = LLM("owner/target@main", draft="owner/draft", draft_revision="main")
    assert llm.engine.config.target == str(snapshot)
    assert llm.engine.resolved.method == "dflash"
    status, out, _ = main("info", "owner/target", "--draft=owner/draft", "--json")
    assert status == 0
    facts = json.loads(out)
    assert (facts["path"], facts["pair"]) == (str(snapshot), "fits")


def test_offline_what_is_not_in_the_cache_is_said_with_its_mend(
    cache: Callable[[str, Path], Path], pair: Pair
):
    assert "HF_HUB_OFFLINE is set; unset it, or run 'hf download owner/tiny-model'" in sentence(
        NAME
    )
    cache(NAME, pair.target)
    assert directory(NAME, None).endswith(COMMIT)
    assert "HF_HUB_OFFLINE" in sentence(NAME, "v2")
