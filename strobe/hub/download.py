"""Download models of the Hugging Face hub to its cache, which other programs share.

Configs and tokenizers are downloaded first, and weights once the configs are known to be good.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NamedTuple

from strobe.hub.files import weight_files
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.hub.gguf_file import is_gguf
from strobe.hub.packaged import MODELS, is_packaged, packaged_file

logger = logging.getLogger(__name__)

DESCRIBING = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "mask_embedding.pt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
"""The files that an engine reads besides the weights."""
UNWANTED = ("*/*",)
"""Files in subdirectories, which hold other copies."""

_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(@(?P<revision>[^@\s]+))?")


def is_hub_name(name: str) -> bool:
    """Whether the name has the form owner/model or owner/model@revision and is no local path."""
    path = Path(name)
    return not path.exists() and path.suffix != ".gguf" and _NAME.fullmatch(name) is not None


def without_revision(name: str) -> str:
    """Cut @revision off owner/model@revision; return other names as they are."""
    match = _NAME.fullmatch(name)
    return match["name"] if match else name


class Snapshot(NamedTuple):
    """A model's directory in the hub's cache: the cache, the model's name and its commit."""

    cache: Path
    name: str
    commit: str


def snapshot_of(directory: Path) -> Snapshot | None:
    """Parse a path CACHE/models--OWNER--MODEL/snapshots/COMMIT; return None for other paths, which
    are in no cache."""
    absolute = directory.absolute()
    cache = absolute.parent.parent
    commit = absolute.name
    kind, _, name = cache.name.partition("--")
    if absolute.parent.name != "snapshots" or kind != "models" or not name:
        return None
    return Snapshot(cache.parent, name.replace("--", "/"), commit)


def display_name(path: Path) -> str:
    """Return the name that a user knows a checkpoint's directory or GGUF file by: the hub's, not
    the commit's, which names the directory in the cache."""
    snapshot = snapshot_of(path)
    return path.absolute().name if snapshot is None else snapshot.name


def find_checkpoint(name: str, revision: str | None, option: str = "revision") -> str:
    """Return the checkpoint's directory: a local path as it is; for a GGUF file, a packaged model's
    included, the directory that describes it; for a hub name its directory in the cache, after
    everything but the weights was downloaded.

    revision: branch, tag or commit; option: the name of the option it came from. Raises ValueError
    with one sentence if the model cannot be downloaded.
    """
    if not is_hub_name(name):
        if revision is not None:
            kind = "of a package" if is_packaged(name) else "a directory"
            raise ValueError(
                f"{option} is {revision!r}, but {name} is {kind}, not a name on the Hugging Face "
                f"hub; leave {option} out."
            )
        if is_packaged(name):
            return str(gguf_directory(packaged_file(name, logger.warning), MODELS[name].sampling))
        near = get_close_matches(name.lower(), MODELS, n=1)
        if near and not Path(name).exists():
            raise ValueError(
                f"{name} is neither a directory nor a model that can be pulled; did you mean "
                f"{near[0]}? Names on the Hugging Face hub have an owner, such as Qwen/Qwen3-0.6B."
            )
        return str(gguf_directory(Path(name))) if is_gguf(Path(name)) else name
    match = _NAME.fullmatch(name)
    assert match is not None
    name_revision = match["revision"]
    if name_revision is not None and revision is not None and name_revision != revision:
        raise ValueError(
            f"{name} names the revision {name_revision!r}, but {option} is {revision!r}; give "
            "one of them."
        )
    files = _download_files(match["name"], DESCRIBING, revision=name_revision or revision)
    path = _run_download(match["name"], name_revision or revision, files)
    logger.info("%s is read from %s", _shown(match["name"], name_revision or revision), path)
    return path


def missing_weights(directory: Path) -> list[str]:
    """Return the weight files missing from a directory of the hub's cache; none for others."""
    if snapshot_of(directory) is None:
        return []
    return [name for name in weight_files(directory) if not (directory / name).exists()]


def fetch_weights(*directories: str | Path) -> None:
    """Download the missing weights of directories in the hub's cache; others are left as they are.
    Raises ValueError with one sentence if they cannot be downloaded."""
    import huggingface_hub
    from huggingface_hub import constants

    for path in map(Path, directories):
        snapshot = snapshot_of(path)
        missing = missing_weights(path)
        if snapshot is None or not missing:
            continue
        if constants.HF_HUB_OFFLINE:  # the client would accept the incomplete directory
            raise ValueError(_out_of_reach(snapshot.name, snapshot.commit))
        fetch_all = _download_files(
            snapshot.name, missing, revision=snapshot.commit, cache=snapshot.cache
        )
        _run_download(snapshot.name, snapshot.commit, fetch_all)
        # Without a network the client accepts it, too; a download of one file raises the reason.
        if missing := missing_weights(path):
            fetch_one = partial(
                huggingface_hub.hf_hub_download,
                snapshot.name,
                missing[0],
                revision=snapshot.commit,
                cache_dir=snapshot.cache,
            )
            _run_download(snapshot.name, snapshot.commit, fetch_one)


def _download_files(
    name: str, files: Sequence[str], *, revision: str | None, cache: Path | None = None
) -> Callable[[], str]:
    """Return a function that downloads several files and returns their directory."""
    from huggingface_hub import snapshot_download

    return partial(
        snapshot_download,
        name,
        revision=revision,
        cache_dir=cache,
        allow_patterns=list(files),
        ignore_patterns=list(UNWANTED),
    )


def _run_download(name: str, revision: str | None, download: Callable[[], str]) -> str:
    """Run a model's download and return its path. Raises ValueError with one sentence if it
    fails."""
    from huggingface_hub import errors

    shown = _shown(name, revision)
    check_cache(shown)
    try:
        return str(download())
    except errors.GatedRepoError:
        problem = (
            f"{shown} is gated: accept its terms on its page on the Hugging Face hub, then log in "
            "with 'hf auth login' or set HF_TOKEN."
        )
    except errors.RepositoryNotFoundError:
        problem = (
            f"{shown} is neither a directory here nor a model on the Hugging Face hub that you may "
            "see; check the name, or log in with 'hf auth login' if it is private."
        )
    except errors.RevisionNotFoundError:
        problem = f"{name} has no revision {revision!r}; name a branch, tag or commit that it has."
    except errors.HFValidationError:
        problem = f"{shown} is neither a directory here nor a possible name on the hub; correct it."
    except errors.LocalEntryNotFoundError:
        problem = _out_of_reach(name, revision)
    except errors.EntryNotFoundError:
        problem = (
            f"{shown} has no weights in safetensors, or not all that its index names; use a model "
            "that is published in them."
        )
    except Exception as error:  # the client's libraries raise many kinds of errors
        reason = (str(error).strip().splitlines() or [""])[0]
        problem = (
            f"{shown} could not be downloaded ({type(error).__name__}: {reason}); try again, or "
            "name a directory that holds it."
        )
    raise ValueError(problem) from None


def check_cache(name: str) -> None:
    """Raise ValueError if the hub's cache, which `name` needs, cannot exist."""
    from huggingface_hub import constants

    if constants.HF_HUB_CACHE.startswith("~"):  # not expanded: there is no home directory
        raise ValueError(
            f"{name} needs the hub's cache, but this user has no home directory; set HF_HOME to a "
            "directory."
        )


def _shown(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name}@{revision}"


def _out_of_reach(name: str, revision: str | None) -> str:
    from huggingface_hub import constants

    missing = f"{_shown(name, revision)} is not a directory here and not wholly in the hub's cache"
    if not constants.HF_HUB_OFFLINE:
        return (
            f"{missing}, and the Hugging Face hub cannot be reached; check the connection and "
            "HTTPS_PROXY."
        )
    by_hand = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    return (
        f"{missing}, and HF_HUB_OFFLINE is set; unset it, or run '{by_hand}' where there is a "
        "network."
    )
