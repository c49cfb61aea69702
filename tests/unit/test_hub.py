"""Names on the hub: what is asked of it, what a user is told, and a cache without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from textpair import Pair
from tiny import edit_json

from strobe import LLM
from strobe.hub.download import directory, fetch_weights
from strobe.tools.eval.sources import fetch

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


def wanted(published: list[str], call: dict[str, Any]) -> list[str]:
    """The files of a repository that a call asks for."""
    patterns = {key: call[key] for key in ("allow_patterns", "ignore_patterns")}
    return list(huggingface_hub.utils.filter_repo_objects(published, **patterns))


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
def test_hub_name_is_fetched_at_its_revision(
    hub: Callable[..., Any], given: str, revision: str | None, asked: str | None
):
    calls = hub("/cache/found")
    assert directory(given, revision) == "/cache/found"
    assert [(call["name"], call["revision"]) for call in calls] == [(NAME, asked)]


def test_only_describing_files_are_fetched_first(hub: Callable[..., Any]):
    calls = hub("/cache/found")
    directory(NAME, None)
    (call,) = calls
    published = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "model.safetensors.index.json", "vocab.json", "merges.txt",
        "model.safetensors", "model-00001-of-00002.safetensors", "README.md", "dflash.py",
        "pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "q4.gguf",
        "original/config.json", "metal/model.bin", "onnx/model.onnx", "flax_model.msgpack",
    ]  # fmt: skip
    assert wanted(published, call) == published[:8]


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


def test_two_revisions_conflict(hub: Callable[..., Any]):
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
def test_failure_is_one_sentence(
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


def test_offline_miss_is_an_error_with_a_fix(
    cache: Callable[[str, Path], Path], pair: Pair, tmp_path: Path
):
    assert "HF_HUB_OFFLINE is set; unset it, or run 'hf download owner/tiny-model'" in sentence(
        NAME
    )
    cache(NAME, pair.target)
    assert directory(NAME, None).endswith(COMMIT)
    assert "HF_HUB_OFFLINE" in sentence(NAME, "v2")
    fetch_weights(*(tmp_path / "hub").glob("models--*/snapshots/*"))
    (described := tmp_path / "described").mkdir()
    shutil.copy(pair.target / "config.json", described)
    with pytest.raises(ValueError, match=f"owner/part@{COMMIT} is not .* HF_HUB_OFFLINE is set"):
        fetch_weights(cache("owner/part", described))


# weights come last


class Shelf:
    """A hub with repositories; asked: the files that were asked for, as owner/model/file."""

    def __init__(self, cache: Path):
        self.cache, self.asked = cache, list[str]()
        self.repositories: dict[str, Path] = {}

    def download(self, name: str, *, cache_dir: Path | None = None, **call: Any) -> str:
        assert cache_dir in (None, self.cache)
        assert call["revision"] in (None, COMMIT)
        source = self.repositories[name]
        snapshot = self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in wanted(sorted(file.name for file in source.iterdir()), call):
            self.asked.append(f"{name}/{file}")
            (snapshot / file).unlink(missing_ok=True)
            (snapshot / file).symlink_to(source / file)
        return str(snapshot)

    @property
    def weights(self) -> list[str]:
        return [file for file in self.asked if file.endswith(".safetensors")]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> Shelf:
    """Copies of a target and its drafter that a test may change."""
    made = Shelf(tmp_path / "cache")
    for name, source in (("me/target", pair.target), ("me/draft", pair.draft)):
        made.repositories[name] = tmp_path / name
        shutil.copytree(source, tmp_path / name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made


def test_weights_are_fetched_once_after_describing_files(shelf: Shelf):
    for _ in range(2):
        LLM("me/target", draft="me/draft")
    assert shelf.weights == ["me/draft/model.safetensors", "me/target/model.safetensors"]
    before = shelf.asked[: shelf.asked.index(shelf.weights[0])]
    assert {"me/target/config.json", "me/draft/config.json"} <= {*before}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": (
        "me/target",
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
        "is not a supported target",
    ),
    "method": ("me/draft", {"architectures": ["DFlash2DraftModel"]}, "a drafter for DFlash2"),
    "pair": ("me/draft", {"hidden_size": 48}, "hidden_size is 48, the target's is"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("command", ["generate", "info"])
def test_unrunnable_pair_is_rejected_before_fetching_weights(
    shelf: Shelf, main: Callable[..., Any], command: str, reason: str
):
    name, changes, part = REFUSED[reason]
    edit_json(shelf.repositories[name] / "config.json", **changes)
    words = ["Hello", "--target"] if command == "generate" else []
    status, _, err = main(command, *words, "me/target", "--draft=me/draft")
    assert (status, part in err) == (2, True)
    assert f"{name}/config.json" in shelf.asked
    assert not shelf.weights


@pytest.mark.parametrize("reason", ["method", "pair"])
def test_doctor_fetches_weights_of_fitting_pairs(
    shelf: Shelf, main: Callable[..., Any], reason: str
):
    _, changes, part = REFUSED[reason]
    path = shelf.repositories["me/draft"] / "config.json"
    good = path.read_text()
    edit_json(path, **changes)
    status, out, _ = main("doctor", "me/target", "me/draft", "--json")
    assert status == 1
    assert [part in f["says"] for f in json.loads(out)["findings"] if f["level"] == "fault"] == [
        True
    ]
    assert not shelf.weights
    path.write_text(good)
    main("doctor", "me/target", "me/draft", "--json")
    assert shelf.weights == ["me/target/model.safetensors", "me/draft/model.safetensors"]


def test_only_missing_indexed_weights_are_fetched(shelf: Shelf):
    target = shelf.repositories["me/target"]
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in (*shards, "consolidated.safetensors"):
        (target / file).touch()
    found = Path(directory("me/target", None))
    fetch_weights(found)
    assert shelf.weights == [f"me/target/{shard}" for shard in shards]
    (found / shards[0]).unlink()  # as an interrupted download leaves it
    fetch_weights(found)
    assert shelf.weights[2:] == [f"me/target/{shards[0]}"]
    fetch_weights(target)  # no part of the cache
    assert len(shelf.weights) == 3


def test_doctor_checks_local_weights_despite_config_mismatch(
    shelf: Shelf, main: Callable[..., Any]
):
    target, draft = shelf.repositories["me/target"], shelf.repositories["me/draft"]
    edit_json(target / "config.json", model_type="qwen3_next")
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    _, out, _ = main("doctor", str(target), str(draft), "--json")
    faults = [f["about"] for f in json.loads(out)["findings"] if f["level"] == "fault"]
    assert faults == ["target's config", "drafter's tensors"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (errors.LocalEntryNotFoundError("no network"), "the Hugging Face hub cannot be reached"),
        (http(errors.RemoteEntryNotFoundError, 404), "has no weights in safetensors"),
    ],
)
def test_failed_weights_are_retried_once_for_the_reason(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, answer: Exception, message: str
):
    """A client without a network takes a snapshot without them for the whole."""

    def download(name: str, file: str, **options: Any) -> str:
        assert (name, file, options["revision"]) == ("me/target", "model.safetensors", COMMIT)
        raise answer

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (shelf.repositories["me/target"] / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"me/target@{COMMIT} .*{message}"):
        LLM("me/target")


def test_random_weights_need_no_download(shelf: Shelf):
    LLM("me/target", draft="me/draft", load_format="dummy")
    assert not shelf.weights


def test_user_without_home_has_no_cache(
    hub: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    calls = hub("/anywhere")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert "no home directory; set HF_HOME" in sentence(NAME)
    with pytest.raises(ValueError, match=r"data set owner/set .* no home directory; set HF_HOME"):
        fetch("owner/set", ["*"], "set")
    assert calls == []
