"""Models of the Hugging Face hub by their id, through huggingface_hub's own cache and token.

    org/name            the newest version that is in the cache, else the newest there is
    org/name@revision   a branch, tag or commit
    org/name/file.gguf  one file of a repository of GGUF files

What is in the cache is used as it is, without a network; `update` (`monoplan pull`) looks for a newer version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monoplan.ir.errors import LoadError, install_extra

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+?))?(/(?P<file>[\w./-]+\.gguf))?")
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".py", ".json")  # a name that ends so is a path
# What a directory is read for. Folders of a repository hold the model in other formats, and pickles are not read.
_SMALL = re.compile(r"(tokenizer|config|generation_config|special_tokens_map)[\w.]*json|chat_template\.jinja")
_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors(\.index\.json)?")


def local_path(model: str | os.PathLike[str], *, update: bool = False) -> Path:
    """The path of a model on this machine: the given one if it exists, else that of a hub id, which is fetched."""
    found = _ID.fullmatch(os.fspath(model))
    if found is None or found["repo"].endswith(_FILES) or os.path.exists(model):
        return Path(model)
    try:
        import huggingface_hub.errors
    except ImportError:
        why = "it would be an id of the hub, but the package huggingface_hub is not installed"
        fix = f"correct the path, or {install_extra('hub')}"
        raise LoadError("there is no such model", where=model, why=why, fix=fix) from None
    with _in_words(model):
        return _find(huggingface_hub, found["repo"], found["revision"], found["file"], update)


def _find(hub: Any, repo: str, revision: str | None, file: str | None, update: bool) -> Path:
    if not update:
        with suppress(hub.errors.LocalEntryNotFoundError):
            folder = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
            path = folder if file is None else folder / file
            if path.is_file() or (file is None and _is_whole(folder)):
                return path
    # Not list_repo_files: without a network that tries for half a minute.
    found = hub.HfApi().model_info(repo, revision=revision, timeout=20)
    names = [file.rfilename for file in found.siblings or []]
    if file is None and not any(map(_WEIGHTS.fullmatch, names)):
        file = _only_gguf(repo, names)
    if file is not None:
        return Path(hub.hf_hub_download(repo, file, revision=revision))
    # The weights come last: where they are, all else is.
    for pattern in (_SMALL, _WEIGHTS):
        wanted = [name for name in names if pattern.fullmatch(name)]
        folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether all weights of a model are in a folder of the cache; files come into it whole."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = json.loads(index.read_text("utf-8")).get("weight_map", {}).values()
        return all((folder / name).is_file() for name in shards)
    return (folder / "model.safetensors").is_file() or len(list(folder.glob("*.gguf"))) == 1


def _only_gguf(repo: str, names: list[str]) -> str:
    found = sorted(name for name in names if name.endswith(".gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(f"{repo}/{name}" for name in found[:6])
        raise LoadError(f"{len(found)} GGUF files in the repository", where=repo, fix=f"name one of {shown}")
    why = f"it has {', '.join(names[:12])}" if names else "it is empty"
    raise LoadError("the repository has neither safetensors nor GGUF files", where=repo, why=why)


@contextmanager
def _in_words(model: object) -> Iterator[None]:
    """Errors of huggingface_hub and of the network as one of ours."""
    from huggingface_hub import errors

    try:
        yield
    except LoadError:
        raise
    except errors.GatedRepoError:
        fix = "accept them at its page, then `hf auth login`, or set HF_TOKEN"
        raise LoadError("the model has terms to accept first", where=model, fix=fix) from None
    except errors.RepositoryNotFoundError:
        why = "no such path exists, and the hub has no such repository that you may read"
        fix = "correct it; for a private one `hf auth login`, or set HF_TOKEN"
        raise LoadError("there is no such model", where=model, why=why, fix=fix) from None
    except errors.RevisionNotFoundError:
        raise LoadError("the repository has no such revision", where=model) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = "no such path exists; as an id of the hub, it is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
        fix = "correct the path, or `monoplan pull` it once with a network"
        raise LoadError("there is no such model here", where=model, why=why, fix=fix) from None
    except errors.EntryNotFoundError:
        raise LoadError("the repository has no such file", where=model) from None
    except Exception as error:  # those of the network come from several libraries
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"no such path exists, and the hub can't be reached: {lines[-1]:.200}"
        fix = "correct the path, or try again with a network"
        raise LoadError("there is no such model here", where=model, why=why, fix=fix) from None
