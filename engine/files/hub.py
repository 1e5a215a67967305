"""Finds models by Hugging Face names in this machine's cache of the hub. Downloads nothing."""

import os
import re
from pathlib import Path

import kccl

from ..base.fields import read_json
from .hf_files import INDEX, WEIGHTS

_NAME = r"[A-Za-z0-9_][\w.-]{0,95}"
_REPOSITORY = re.compile(rf"(?P<repository>(?:{_NAME}/)?{_NAME})(?::(?P<file>[^\0]+))?", re.ASCII)
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_BRANCH = "main"


def find_in_hub(name: str) -> Path | None:
    """Returns the folder or file of a repository in the cache.

    Args:
        name: "people/model", or "people/model:FILE" for one of several GGUF files. FILE may be a
            part of the file's name, as in "people/model:Q4_K_M".

    Returns:
        The path. None if the name cannot be a repository's, or if it has no "/" and the cache does
        not have it.

    Raises:
        kccl.Error: The cache does not have the repository, or not all of it. The text names the
            cache and the command that downloads the repository.
    """
    found = _REPOSITORY.fullmatch(name)
    if found is None:
        return None
    repository, file = found["repository"], found["file"]
    cache = hub_cache()
    folder = cache / f"models--{repository.replace('/', '--')}"
    if not os.path.isdir(folder):
        if "/" not in repository:
            return None
        # The user must mean a folder or file of this machine, so the error names no repository.
        if os.path.isdir(repository.split("/")[0]) or (
            file is None and repository.endswith((".gguf", ".safetensors"))
        ):
            raise kccl.Error(f"model {name!r} does not exist")
        raise kccl.Error(
            f"model {name!r} is neither bundled, smollm2, a folder nor a GGUF file, and the hub's "
            f"cache, {cache}, does not have it: run `{_command(repository, file)}`, a "
            "command of the package huggingface_hub"
        )
    snapshot = _snapshot(folder, repository, file)
    if file is not None:
        return _gguf(snapshot, repository, file)
    if any(snapshot.glob("*.safetensors")) or (snapshot / INDEX).exists():
        _check_complete(snapshot, repository)
        return snapshot
    if any(snapshot.glob("**/*.gguf")):
        return _gguf(snapshot, repository, None)
    # For weights in other formats, returns the folder: opening it raises an error that says more.
    if any(snapshot.glob("*.bin")) or any(snapshot.glob("adapter_*")):
        return snapshot
    raise kccl.Error(
        f"{snapshot} has no weights: run `{_command(repository, None)}`, which downloads all of it"
    )


def hub_cache() -> Path:
    """Returns the folder in which Hugging Face's tools keep their downloads."""
    for variable, below in (
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser() / below
    return Path("~/.cache/huggingface/hub").expanduser()


def _command(repository: str, file: str | None) -> str:
    is_name = file is not None and file.endswith(".gguf")
    return f"hf download {repository}{f' {file}' if is_name else ''}"


def _snapshot(folder: Path, repository: str, file: str | None) -> Path:
    """Returns the folder with the files of the newest download."""
    try:
        commit = (folder / "refs" / _BRANCH).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    snapshot = folder / "snapshots" / commit
    if commit and Path(commit).name == commit and snapshot.is_dir():
        return snapshot
    others = sorted(each for each in (folder / "snapshots").glob("*") if each.is_dir())
    more = f"; to use another revision, give its folder, {others[0]}" if others else ""
    raise kccl.Error(
        f"{folder} does not have the revision {_BRANCH}: run `{_command(repository, file)}`{more}"
    )


def _check_complete(snapshot: Path, repository: str) -> None:
    """Raises kccl.Error if files of the download are missing."""
    index = snapshot / INDEX
    weight_map = read_json(index).get("weight_map") if index.exists() else None
    files = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    wanted = ["config.json", *sorted(each for each in files if isinstance(each, str))]
    # In the cache the file is a link to a blob. If the blob is missing, the download is not
    # complete.
    if (snapshot / WEIGHTS).is_symlink():
        wanted.append(WEIGHTS)
    missing = [each for each in wanted if not (snapshot / each).exists()]
    if missing and not (snapshot / WEIGHTS).exists():
        raise kccl.Error(
            f"{snapshot} is not complete, {missing[0]} is missing: run "
            f"`{_command(repository, None)}`, which downloads the rest"
        )


def _gguf(snapshot: Path, repository: str, wanted: str | None) -> Path:
    """Returns the GGUF file that `wanted` names. If `wanted` is None, returns the only one. If the
    model has several parts, returns the first part.
    """
    files = sorted(each for each in snapshot.glob("**/*.gguf") if each.exists())
    names = {each: each.relative_to(snapshot).as_posix() for each in files}
    for file, name in names.items():
        if wanted == name:
            return file
    first = [
        file
        for file, name in names.items()
        if (part := _PART.search(name)) is None or int(part[1]) == 1
    ]
    if wanted is not None:
        first = [file for file in first if wanted.lower() in names[file].lower()]
    # Leaves out projectors ("mmproj"), which encode images and are no models.
    models = [file for file in first if not file.name.startswith("mmproj")] or first
    if len(models) == 1:
        return models[0]
    if models:
        told = f"has several GGUF files, {', '.join(names[each] for each in models[:20])}: name "
        told += f"one, as in {repository}:{names[models[0]]}"
    else:
        told = f"has no GGUF file that is called {wanted}: run `{_command(repository, wanted)}`"
    raise kccl.Error(f"{snapshot} {told}")
