"""Names on the hub: requests to it, error messages, and a cache without a network."""

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

from strobe import LLM
from strobe.engine import build
from strobe.hub.download import display_name, fetch_weights, find_checkpoint
from strobe.runner import memory
from strobe.tools.eval.sources import fetch
from tests.support.text_pair import Pair
from tests.support.tiny_checkpoints import edit_json

NAME, COMMIT = "owner/tiny-model", "a" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """hub(answer) patches snapshot_download to return or raise answer, and returns its calls."""

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
    """Return an error as the hub's client raises it, with several lines."""
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))
    error: Any = kind
    return error("Client Error.\n\nA page of explanations.", response=response)


def files_to_fetch(published: list[str], call: dict[str, Any]) -> list[str]:
    """Return the files of a repository that a call fetches."""
    patterns = {key: call[key] for key in ("allow_patterns", "ignore_patterns")}
    return list(huggingface_hub.utils.filter_repo_objects(published, **patterns))


def sentence(name: str, revision: str | None = None) -> str:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        find_checkpoint(name, revision)
    message = str(caught.value)
    assert "\n" not in message
    assert name.partition("@")[0] in message
    return message


@pytest.mark.parametrize(
    ("name", "revision", "fetched"),
    [
        (NAME, None, None),
        (f"{NAME}@v1.0", None, "v1.0"),
        (NAME, "main", "main"),
        (f"{NAME}@main", "main", "main"),
    ],
)
def test_hub_name_is_fetched_at_its_revision(
    hub: Callable[..., Any], name: str, revision: str | None, fetched: str | None
):
    calls = hub("/cache/snapshot")
    assert find_checkpoint(name, revision) == "/cache/snapshot"
    assert [(call["name"], call["revision"]) for call in calls] == [(NAME, fetched)]


def test_only_describing_files_are_fetched_first(hub: Callable[..., Any]):
    calls = hub("/cache/snapshot")
    find_checkpoint(NAME, None)
    (call,) = calls
    published = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "model.safetensors.index.json", "vocab.json", "merges.txt",
        "model.safetensors", "model-00001-of-00002.safetensors", "README.md", "dflash.py",
        "pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors", "q4.gguf",
        "original/config.json", "metal/model.bin", "onnx/model.onnx", "flax_model.msgpack",
    ]  # fmt: skip
    assert files_to_fetch(published, call) == published[:8]


def test_local_directory_has_precedence(
    hub: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = hub("/cache/snapshot")
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert find_checkpoint(NAME, None) == NAME
    assert "is a directory, not a name" in sentence(NAME, "main")
    for path in ("/nowhere/model", "model", "../a/b", "~/models/b", "a/b/c"):
        assert find_checkpoint(path, None) == path  # reading its config.json reports the error
    assert not calls


def test_two_revisions_conflict(hub: Callable[..., Any]):
    hub("/cache/snapshot")
    message = sentence(f"{NAME}@v1", "v2")
    assert "names the revision 'v1', but revision is 'v2'" in message


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


def test_ctrl_c_during_a_download_is_not_a_hub_error(hub: Callable[..., Any]):
    hub(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        find_checkpoint(NAME, None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Path]:
    """cache(name, directory) stores a snapshot in the hub client's layout and returns it; tests
    have HF_HUB_OFFLINE set."""
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name: str, source: Path) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        for file in source.iterdir():
            (snapshot / file.name).symlink_to(file)
        return snapshot

    return put


def test_cached_pair_runs_without_a_network(
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
    assert find_checkpoint(NAME, None).endswith(COMMIT)
    assert "HF_HUB_OFFLINE" in sentence(NAME, "v2")
    fetch_weights(*(tmp_path / "hub").glob("models--*/snapshots/*"))
    (described := tmp_path / "described").mkdir()
    shutil.copy(pair.target / "config.json", described)
    with pytest.raises(ValueError, match=f"owner/part@{COMMIT} is not .* HF_HUB_OFFLINE is set"):
        fetch_weights(cache("owner/part", described))


# weights are fetched last


class FakeHub:
    """A hub with repositories; `fetched` lists the fetched files, as owner/model/file."""

    def __init__(self, cache: Path):
        self.cache, self.fetched = cache, list[str]()
        self.repositories: dict[str, Path] = {}

    def download(self, name: str, *, cache_dir: Path | None = None, **call: Any) -> str:
        assert cache_dir in (None, self.cache)
        assert call["revision"] in (None, COMMIT)
        source = self.repositories[name]
        snapshot = self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in files_to_fetch(sorted(file.name for file in source.iterdir()), call):
            self.fetched.append(f"{name}/{file}")
            (snapshot / file).unlink(missing_ok=True)
            (snapshot / file).symlink_to(source / file)
        return str(snapshot)

    @property
    def weights(self) -> list[str]:
        return [file for file in self.fetched if file.endswith(".safetensors")]


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> FakeHub:
    """Return a fake hub with copies of a target and its drafter that a test may change."""
    hub = FakeHub(tmp_path / "cache")
    for name, source in (("me/target", pair.target), ("me/draft", pair.draft)):
        hub.repositories[name] = tmp_path / name
        shutil.copytree(source, tmp_path / name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    return hub


def test_weights_are_fetched_once_after_describing_files(fake_hub: FakeHub):
    for _ in range(2):
        LLM("me/target", draft="me/draft")
    assert fake_hub.weights == ["me/draft/model.safetensors", "me/target/model.safetensors"]
    before = fake_hub.fetched[: fake_hub.fetched.index(fake_hub.weights[0])]
    assert {"me/target/config.json", "me/draft/config.json"} <= {*before}


REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": (
        "me/target",
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "is not a supported target",
    ),
    "method": ("me/draft", {"architectures": ["DFlareDraftModel"]}, "a drafter for DFlare"),
    "pair": ("me/draft", {"hidden_size": 48}, "hidden_size is 48, the target's is"),
}


@pytest.mark.parametrize("reason", REJECTED)
@pytest.mark.parametrize("command", ["generate", "info"])
def test_unrunnable_pair_is_rejected_before_fetching_weights(
    fake_hub: FakeHub, main: Callable[..., Any], command: str, reason: str
):
    name, changes, part = REJECTED[reason]
    edit_json(fake_hub.repositories[name] / "config.json", **changes)
    words = ["Hello", "--target"] if command == "generate" else []
    status, _, err = main(command, *words, "me/target", "--draft=me/draft")
    assert (status, part in err) == (2, True)
    assert f"{name}/config.json" in fake_hub.fetched
    assert not fake_hub.weights


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (100_000, {}, "The weights take .* bytes, but cpu has 100000 bytes free; use a smaller"),
        (10**8, {"kv_cache_memory": "1GiB"}, r"kv_cache_memory is 1GiB .* ask for less"),
        (10**8, {"kv_offload_memory": "1GiB"}, "kv_offload_memory takes .* ask for less"),
        (10**8, {"max_num_seqs": 10**6}, "max_num_seqs is 1000000, whose .* ask for fewer"),
    ],
)
def test_what_cannot_fit_is_rejected_before_fetching_weights(
    fake_hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    options: dict[str, Any],
    message: str,
):
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    with pytest.raises(ValueError, match=message):
        LLM("me/target", draft="me/draft", **options)
    assert "me/target/config.json" in fake_hub.fetched
    assert not fake_hub.weights


def test_info_describes_a_pair_without_its_weights(fake_hub: FakeHub, main: Callable[..., Any]):
    status, out, _ = main("info", "me/target", "--draft=me/draft", "--json")
    facts = json.loads(out)
    assert (status, fake_hub.weights) == (0, [])
    assert facts["weights"] == facts["draft"]["weights"]
    assert facts["weights"] == "1 file to download; their tensors are checked then"
    LLM("me/target", draft="me/draft")
    _, out, _ = main("info", "me/target", "--draft=me/draft", "--json")
    local = json.loads(out)
    assert local["parameters"] == facts["parameters"]
    assert local["draft"]["parameters"] == facts["draft"]["parameters"]
    assert local["memory"] == facts["memory"]


def test_doctor_reports_what_cannot_fit_before_fetching_weights(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Any]
):
    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    status, out, _ = main("doctor", "me/target", "me/draft", "--json")
    faults = [f for f in json.loads(out)["findings"] if f["level"] == "fault"]
    assert (status, [fault["about"] for fault in faults]) == (1, ["settings"])
    assert "cpu has 100000 bytes free; use a smaller model" in faults[0]["says"]
    assert not fake_hub.weights


def test_weights_of_unknown_size_are_fetched_and_then_checked(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def unknown(resolved: Any) -> dict[str, int]:
        raise ValueError("only the tensors tell.")

    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    monkeypatch.setattr(build, "weight_sizes", unknown)
    with pytest.raises(ValueError, match=r"The weights take .* bytes, but cpu has 100000 bytes"):
        LLM("me/target")
    assert fake_hub.weights == ["me/target/model.safetensors"]
    assert "known once they are downloaded: only the tensors tell." in caplog.text


@pytest.mark.parametrize("reason", ["method", "pair"])
def test_doctor_fetches_weights_of_fitting_pairs(
    fake_hub: FakeHub, main: Callable[..., Any], reason: str
):
    _, changes, part = REJECTED[reason]
    path = fake_hub.repositories["me/draft"] / "config.json"
    good = path.read_text()
    edit_json(path, **changes)
    status, out, _ = main("doctor", "me/target", "me/draft", "--json")
    assert status == 1
    assert [part in f["says"] for f in json.loads(out)["findings"] if f["level"] == "fault"] == [
        True
    ]
    assert not fake_hub.weights
    path.write_text(good)
    main("doctor", "me/target", "me/draft", "--json")
    assert fake_hub.weights == ["me/target/model.safetensors", "me/draft/model.safetensors"]


def test_only_missing_indexed_weights_are_fetched(fake_hub: FakeHub):
    target = fake_hub.repositories["me/target"]
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in (*shards, "consolidated.safetensors"):
        (target / file).touch()
    snapshot = Path(find_checkpoint("me/target", None))
    fetch_weights(snapshot)
    assert fake_hub.weights == [f"me/target/{shard}" for shard in shards]
    (snapshot / shards[0]).unlink()  # as an interrupted download leaves it
    fetch_weights(snapshot)
    assert fake_hub.weights[2:] == [f"me/target/{shards[0]}"]
    fetch_weights(target)  # outside the cache
    assert len(fake_hub.weights) == 3


def test_doctor_checks_local_weights_despite_config_mismatch(
    fake_hub: FakeHub, main: Callable[..., Any]
):
    target, draft = fake_hub.repositories["me/target"], fake_hub.repositories["me/draft"]
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
def test_missing_weights_are_retried_once_to_learn_why(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, answer: Exception, message: str
):
    """Without a network, the client reports a snapshot without weights as complete."""

    def download(name: str, file: str, **options: Any) -> str:
        assert (name, file, options["revision"]) == ("me/target", "model.safetensors", COMMIT)
        raise answer

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    (fake_hub.repositories["me/target"] / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"me/target@{COMMIT} .*{message}"):
        LLM("me/target")


def test_random_weights_need_no_download(fake_hub: FakeHub):
    LLM("me/target", draft="me/draft", load_format="dummy")
    assert not fake_hub.weights


def test_user_without_home_has_no_cache(
    hub: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    calls = hub("/anywhere")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert "no home directory; set HF_HOME" in sentence(NAME)
    with pytest.raises(ValueError, match=r"data set owner/set .* no home directory; set HF_HOME"):
        fetch("owner/set", ["*"], "set")
    assert calls == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", "Qwen/Qwen3-8B"),
        ("checkpoints/mine", "mine"),
        ("models/Small.Q4_1.gguf", "Small.Q4_1.gguf"),
    ],
)
def test_display_name_is_the_users(tmp_path: Path, path: str, name: str):
    """Progress bars name the model, not a folder of the cache."""
    assert display_name(tmp_path / path) == name
