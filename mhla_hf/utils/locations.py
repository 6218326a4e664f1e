# SPDX-License-Identifier: Apache-2.0
"""From the path or Hub id that a user gives to a directory."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .files import atomic_file, path_inside
from .messages import LIST_LENGTH, one_line, shorten_list


PIPELINE_INDEX = "model_index.json"

EXPORT_FOLDERS = ("onnx", "openvino", "coreml", "original")
"""Folders in which repositories of transformers models keep the same weights for other programs."""
EXPORT_FILES = ("consolidated*.safetensors", "consolidated*.json", "*.gguf", "*.ot", "*.tflite")
"""Files that hold the same weights for other programs."""

LOCATION_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
"""Arguments of `from_pretrained` in diffusers that locate a configuration."""

WEIGHTS = (".safetensors", ".gguf")
"""Suffixes of files that single files of weights are read from."""

_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_URLS = ("https://", "http://", "hf.co/", "huggingface.co/")
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[^/]+/[^/]+)/(?:(?:blob|resolve)/main/)?(?P<name>.+)"
)
# A first part of dots alone is a path.
_HUB_ID = re.compile(r"(?!\.+/)[\w.-]+/[\w.-]+")
# Other formats of the same weights, which are never read.
_NOT_DOWNLOADED = (
    "*.msgpack",
    "*.h5",
    "*.onnx",
    "*.onnx_data",
    "transformer*/*.bin",
    "pytorch_model*.bin",
    *EXPORT_FILES,
    *(f"{name}/*" for name in EXPORT_FOLDERS),
)


class SourceNotFoundError(OSError, ValueError):
    """A location with nothing to read: a mistake of the user, and a missing file."""


def is_hub_id(location: str) -> bool:
    """True for a location that reads like the id of a Hub repository, `owner/name`."""
    return _HUB_ID.fullmatch(location) is not None


def local_directory(location: str | os.PathLike[str], argument: str) -> Path | None:
    """Return the directory that a location names, or `None` for the id of a Hub repository.

    Args:
        location: A directory (`~` is the home directory), or a Hub id `owner/name`. A directory takes precedence.
        argument: Name of the argument, for the error.

    Raises:
        SourceNotFoundError: If it is neither.
    """
    path = Path(location).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(os.fspath(location)):
        raise SourceNotFoundError(f"{argument} {location} is neither a directory nor a Hub id (owner/name).")
    return None


def is_weight_file(location: str | os.PathLike[str]) -> bool:
    """Tell a file of weights, on this machine or by its address on the Hub, from a directory or repository."""
    path = Path(location).expanduser()
    return str(location).startswith(_URLS) or (
        path.suffix in (*WEIGHTS, ".pt", ".pth", ".bin", ".ckpt") and not path.is_dir()
    )


def find_file(location: str | os.PathLike[str], **options: Any) -> Path:
    """Return the path of a file of weights; one on the Hub is downloaded.

    Args:
        location: A path, or an address such as `https://huggingface.co/owner/name/blob/main/file.safetensors`.
        **options: Those for the download are taken: `revision`, `token`, `cache_dir`, `force_download`,
            `local_files_only`.

    Raises:
        ValueError: If there is no such file, it cannot be downloaded, or it may be a pickle.
    """
    path, address = Path(location).expanduser(), _ADDRESS.fullmatch(str(location))
    if not path.is_file() and address is None:
        raise SourceNotFoundError(f"{location} is neither a file nor the address of one on the Hub.")
    if path.suffix not in WEIGHTS:
        raise ValueError(
            f"{location} is not read: only .safetensors and .gguf files are, since others may run code. Save its "
            "weights as safetensors first."
        )
    if path.is_file():
        return path
    from huggingface_hub import hf_hub_download

    assert address is not None
    hub = {key: options[key] for key in _DOWNLOAD_OPTIONS if key in options}
    with hub_downloads(address["repository"], hub.get("cache_dir")):
        return Path(hf_hub_download(address["repository"], address["name"], **hub))


def find_directory(location: str | Path, *, subfolder: str | None = None, **hub: Any) -> tuple[Path, dict[str, Any]]:
    """Return the directory for a path or Hub id, and its origin. Repositories are downloaded with every variant.

    Args:
        location: A directory, or a Hub id `owner/name`.
        subfolder: Only this folder.
        **hub: `revision`, `token`, `cache_dir` and `local_files_only`, for a Hub repository.

    Raises:
        ValueError: If it is neither a directory nor a readable Hub repository.
    """
    origin: dict[str, Any] = {"location": str(location), **({"subfolder": subfolder} if subfolder else {})}
    path = local_directory(location, "source")
    if path is not None:
        # The name alone: records are published, and the rest of the path is private.
        origin["location"] = path.resolve().name
    else:
        patterns = f"{subfolder}/*" if subfolder else None
        path = download_repository(str(location), allow_patterns=patterns, **hub)
        origin["revision"] = hub.get("revision")
        if re.fullmatch(r"[0-9a-f]{40}", path.name):
            origin["commit"] = path.name
    folder = path_inside(path, subfolder, "subfolder") if subfolder else path
    if not folder.is_dir():
        raise SourceNotFoundError(f"subfolder={subfolder!r} is not in {location}.")
    return folder, origin


def local_origin(directory: Path) -> dict[str, str]:
    """Return what a record says of a directory on this machine, for [`recorded_directory`].

    Args:
        directory: The directory.
    """
    path = str(directory.resolve())
    key = _machine_key()
    return {} if key is None else {"path": path, "path_code": _code(key, path)}


def recorded_directory(origin: Mapping[str, Any], owner: Path) -> Path | None:
    """Return the directory that a record of this machine names; `None` for records of others, and for gone ones.

    Anybody may name any path in a record. So a path has a code by a key that never leaves this machine, and none is
    followed from a directory in the Hub's cache.

    Args:
        origin: The entry of the record, with those of [`local_origin`].
        owner: The directory with the record.
    """
    path, code = origin.get("path"), origin.get("path_code")
    is_cached = any(part.startswith("models--") for part in owner.resolve().parts)
    if is_cached or not isinstance(path, str) or not isinstance(code, str):
        return None
    key = _machine_key()
    known = key is not None and hmac.compare_digest(code.encode(), _code(key, path).encode())
    return Path(path) if known and os.path.isdir(path) else None


def _code(key: str, path: str) -> str:
    return hmac.new(key.encode(), path.encode(), "sha256").hexdigest()[:32]


def _machine_key() -> str | None:
    """A random key in the home of the Hub's libraries, made once; `None` where nothing can be written there."""
    from huggingface_hub.constants import HF_HOME

    file = Path(HF_HOME) / "mhla_hf" / "machine-key"
    try:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(secrets.token_hex(16), encoding="ascii")
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def download_repository(repository: str, **options: Any) -> Path:
    """Download a Hub repository, without copies of the weights in formats that are never read.

    Not the files of a pipeline alone: the repository may hold a bare model, and every variant is converted.

    Args:
        repository: Hub id.
        **options: Options of `snapshot_download`.

    Raises:
        ValueError: If the repository cannot be read.
    """
    from huggingface_hub import snapshot_download

    with hub_downloads(repository, options.get("cache_dir")):
        return Path(snapshot_download(repository, ignore_patterns=list(_NOT_DOWNLOADED), **options))


def find_pipeline(location: str | os.PathLike[str], argument: str, **options: Any) -> Path:
    """Return the directory of a pipeline, unread; of a Hub repository, only the pipeline's own files are downloaded.

    Args:
        location: A directory or a Hub id.
        argument: Name of the argument, for the error.
        **options: Options of `DiffusionPipeline.download`; safetensors unless `use_safetensors` says otherwise.

    Raises:
        SourceNotFoundError: If it is neither, or a directory without `model_index.json`.
        OSError: If there is no such repository.
    """
    directory = local_directory(location, argument)
    if directory is None:
        return download_pipeline(os.fspath(location), **options)
    if not (directory / PIPELINE_INDEX).exists():
        raise SourceNotFoundError(f"{argument} {directory} has no {PIPELINE_INDEX}: it is not a pipeline directory.")
    return directory


def download_pipeline(repository: str, **options: Any) -> Path:
    """Download a pipeline from the Hub; options and errors as in [`find_pipeline`]."""
    from diffusers import DiffusionPipeline

    with hub_downloads(repository, options.get("cache_dir")):
        return Path(DiffusionPipeline.download(repository, **{"use_safetensors": True, **options}))


class HubError(OSError, ValueError):
    """A Hub that refuses or cannot be reached, or a damaged download."""


@contextmanager
def hub_downloads(repository: str, cache_dir: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Name the repository in errors of downloads, and check the files that arrived.

    `huggingface_hub` compares checksums of what `hf-xet` transfers; of what it downloads over plain HTTP it compares
    the size alone. Here every new file is hashed; a damaged one is removed from the cache, so that the next attempt
    downloads it again.

    Args:
        repository: Hub id.
        cache_dir: Cache folder that the downloads go to.

    Raises:
        HubError: In the words of `huggingface_hub`, if the Hub refuses or cannot be reached, also where another
            library hides that cause; or if files are damaged. Other errors are not changed.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="model")
    folder = Path(cache_dir or constants.HF_HUB_CACHE).expanduser() / name
    # File systems store times less precisely than the clock.
    started = time.time() - 1
    try:
        yield
    except Exception as error:
        _remove_damaged(folder, started)
        reason = _reason(error)
        if reason is None:
            raise
        raise HubError(f"{repository} cannot be read from the Hub: {reason}") from error
    if damaged := _remove_damaged(folder, started):
        raise HubError(
            f"{shorten_list(damaged)} of {repository} arrived damaged: the checksum is not the Hub's. The download "
            "was removed; run this again to repeat it."
        )


def _reason(error: BaseException) -> str | None:
    """Return what `huggingface_hub` says of an error that it raised or caused; `None` for other errors."""
    from huggingface_hub import errors

    # The base of all errors of the HTTP library, httpx or httpx2 by the version of huggingface_hub.
    kinds = (errors.HfHubHTTPError.__bases__[0], errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    for kind in kinds:
        for cause in seen:
            if isinstance(cause, kind):
                return one_line(cause, LIST_LENGTH) or type(cause).__name__
    return None


def _remove_damaged(folder: Path, since: float) -> list[str]:
    """Remove files of a repository's cache that are newer than a time and do not match their name.

    The cache names contents by the SHA-256 of large files and git's SHA-1 of others.

    Returns:
        Names of the files in the repository.
    """
    damaged = [
        blob
        for blob in folder.glob("blobs/*")
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name)
        and blob.stat().st_mtime >= since
        and not _is_intact(blob)
    ]
    links = [path for path in folder.glob("snapshots/*/**/*") if damaged and path.is_symlink()]
    links = [path for path in links if path.resolve() in [blob.resolve() for blob in damaged]]
    for path in (*links, *damaged):
        path.unlink(missing_ok=True)
    names = [path.relative_to(folder / "snapshots").as_posix().partition("/")[2] for path in links]
    return names or [blob.name for blob in damaged]


def _is_intact(blob: Path) -> bool:
    from huggingface_hub.utils.sha import sha_fileobj

    with blob.open("rb") as file:
        if len(blob.name) == 64:
            return sha_fileobj(file).hex() == blob.name
        content = file.read()
    # Mirrors of the Hub answer with the SHA-1 of the content alone.
    sums = [hashlib.sha1(start + content, usedforsecurity=False) for start in (b"blob %d\0" % len(content), b"")]
    return blob.name in [checksum.hexdigest() for checksum in sums]
