"""Names on the Hugging Face hub to directories, through the cache that other programs share."""

from __future__ import annotations

import logging
import re
from pathlib import Path

logger = logging.getLogger(__name__)

WANTED = (
    "config.json",
    "generation_config.json",
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
    "*.safetensors",
    "model.safetensors.index.json",
)
"""The files that an engine reads."""
UNWANTED = ("*/*", "consolidated*")
"""What matches all the same: other copies of the weights, in folders or in their makers' layout."""

_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(@(?P<revision>[^@\s]+))?")


def is_hub_name(name: str) -> bool:
    """Whether it reads as owner/model or owner/model@revision, and no such directory is here."""
    return not Path(name).exists() and _NAME.fullmatch(name) is not None


def without_revision(name: str) -> str:
    """owner/model of owner/model@revision; any other name as it is."""
    match = _NAME.fullmatch(name)
    return match["name"] if match else name


def directory(name: str, revision: str | None, option: str = "revision") -> str:
    """Where the checkpoint of that name lies: a local directory as it is, a hub name once it has
    been downloaded or found in the cache.

    revision: branch, tag or commit; option: the name of the option that gave it. Raises ValueError
    with one sentence for what cannot be had.
    """
    if not is_hub_name(name):
        if revision is not None:
            raise ValueError(
                f"{option} is {revision!r}, but {name} is a directory, not a name on the Hugging "
                f"Face hub; leave {option} out."
            )
        return name
    match = _NAME.fullmatch(name)
    assert match is not None
    own = match["revision"]
    if own is not None and revision is not None and own != revision:
        raise ValueError(
            f"{name} names the revision {own!r}, but {option} is {revision!r}; give one of them."
        )
    return _snapshot(match["name"], own or revision)


def _snapshot(name: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors, snapshot_download

    shown = name if revision is None else f"{name}@{revision}"
    by_hand = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except errors.GatedRepoError:
        problem = (
            f"{shown} is gated: accept its terms on its page on the Hugging Face hub, then log in "
            "with 'hf auth login' or set HF_TOKEN."
        )
    except errors.RepositoryNotFoundError:
        problem = (
            f"{shown} is neither a directory here nor a model on the Hugging Face hub that you may "
            "see; check its spelling, or log in with 'hf auth login' if it is private."
        )
    except errors.RevisionNotFoundError:
        problem = f"{name} has no revision {revision!r}; name a branch, tag or commit that it has."
    except errors.HFValidationError:
        problem = f"{shown} is neither a directory here nor a possible name on the hub; correct it."
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            problem = (
                f"{shown} is not a directory here and not wholly in the hub's cache, and "
                f"HF_HUB_OFFLINE is set; unset it, or run '{by_hand}' where there is a network."
            )
        else:
            problem = (
                f"{shown} is not a directory here and not wholly in the cache, and the Hugging "
                "Face hub cannot be reached; check the connection and HTTPS_PROXY."
            )
    except Exception as error:  # the libraries below raise errors of many kinds
        reason = (str(error).strip().splitlines() or [""])[0]
        problem = (
            f"{shown} could not be downloaded ({type(error).__name__}: {reason}); try again, or "
            "name a directory that holds it."
        )
    else:
        logger.info("%s is read from %s", shown, found)
        return str(found)
    raise ValueError(problem) from None
