# SPDX-License-Identifier: Apache-2.0
"""From the path or Hub id that a user gives to a directory."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .destinations import atomic_directory
from .files import path_inside
from .messages import did_you_mean, shorten_text


PIPELINE_INDEX = "model_index.json"

EXPORT_FOLDERS = ("onnx", "openvino", "coreml", "original")
"""Folders in which repositories of transformers models keep the same weights for other programs."""
EXPORT_FILES = ("consolidated*.safetensors", "consolidated*.json", "*.gguf", "*.ot", "*.tflite")
"""Files that hold the same weights for other programs."""

LOCATION_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` in diffusers that locate a configuration."""

WEIGHTS = (".safetensors", ".gguf")
"""Suffixes of files that single files of weights are read from."""

_MADE_DATA = ("digits", "generated")
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
"""Options of sources on the Hub."""

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


def check_exists(location: str | os.PathLike[str], argument: str) -> None:
    """Raise `SourceNotFoundError` unless there is a file or directory; see [`local_directory`] for the arguments."""
    if not Path(location).expanduser().exists():
        raise SourceNotFoundError(f"{argument} {location} does not exist.")


def check_data(data: str | None) -> str | None:
    """Check that data are a file or folder that is not empty, a data set or made here; return them. `None` passes.

    Raises:
        SourceNotFoundError: If they are not.
    """
    if data is None:
        return None
    path = Path(data).expanduser()
    if path.is_dir() and next(path.iterdir(), None) is None or path.is_file() and not path.stat().st_size:
        raise SourceNotFoundError(f"data: the {'folder' if path.is_dir() else 'file'} {shorten_text(data)} is empty.")
    if not (path.exists() or data in _MADE_DATA or is_hub_id(data.partition(":")[0])):
        hint = did_you_mean(data, _MADE_DATA)
        raise SourceNotFoundError(f"data: {data} is neither a file or folder nor a data set (owner/name).{hint}")
    return data


def is_weight_file(location: str | os.PathLike[str]) -> bool:
    """Tell a file of weights, on this machine or by its address on the Hub, from a directory or repository."""
    path = Path(location).expanduser()
    return str(location).startswith(_URLS) or (
        path.suffix in (*WEIGHTS, ".pt", ".pth", ".bin", ".ckpt") and not path.is_dir()
    )


def _file_address(location: str | os.PathLike[str]) -> re.Match[str] | None:
    """Match the address of a file on the Hub; `None` for a file on this machine."""
    address = _ADDRESS.fullmatch(str(location))
    if address is None and not Path(location).expanduser().is_file():
        raise SourceNotFoundError(f"{location} is neither a file nor the address of one on the Hub.")
    return address


def check_source(location: str | os.PathLike[str], argument: str) -> None:
    """Raise `SourceNotFoundError` unless a location names a directory, a file of weights, or something on the Hub."""
    if is_weight_file(location):
        _file_address(location)
    else:
        local_directory(location, argument)


def find_file(location: str | os.PathLike[str], **options: Any) -> Path:
    """Return the path of a file of weights; one on the Hub is downloaded.

    Args:
        location: A path, or an address such as `https://huggingface.co/owner/name/blob/main/file.safetensors`.
        **options: Those for the download are taken: `revision`, `token`, `cache_dir`, `force_download`,
            `local_files_only`.

    Raises:
        OSError: If there is no such file, or it cannot be downloaded.
        ValueError: If it may be a pickle.
    """
    path, address = Path(location).expanduser(), _file_address(location)
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
    with checked_downloads(address["repository"], hub.get("cache_dir")):
        return Path(hf_hub_download(address["repository"], address["name"], **hub))


def find_directory(location: str | Path, *, subfolder: str | None = None, **hub: Any) -> tuple[Path, dict[str, Any]]:
    """Return the directory for a path or Hub id, and its origin. Repositories are downloaded with every variant.

    Args:
        location: A directory, or a Hub id `owner/name`.
        subfolder: Only this folder.
        **hub: `revision`, `token`, `cache_dir` and `local_files_only`, for a Hub repository.

    Raises:
        OSError: If it is neither a directory nor a readable Hub repository.
        ValueError: If `subfolder` leads out of it.
    """
    origin: dict[str, Any] = {"location": str(location), **({"subfolder": subfolder} if subfolder else {})}
    path = local_directory(location, "source")
    if path is not None:
        # The name alone: records are published, and the rest of the path is private.
        origin["location"] = path.resolve().name
        path = unpacked(path)
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


def unpacked(directory: Path) -> Path:
    """Return a directory with the model of a GGUF file, for a directory that has one and no configuration.

    transformers reads language models from such files, and cannot save what it has read: the weights move into a new
    model in float32, which is kept beside the cache of the Hub.

    Args:
        directory: Any directory; those of other models are returned as they are.

    Raises:
        ValueError: If transformers does not read the file.
    """
    files = [*directory.glob("*.gguf")]
    if len(files) != 1 or any((directory / name).is_file() for name in ("config.json", PIPELINE_INDEX)):
        return directory
    from huggingface_hub.constants import HF_HOME

    state = files[0].stat()
    key = hashlib.sha256(f"{files[0].resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    target = Path(HF_HOME) / "mhla_hf" / f"{files[0].stem}-{key}"
    if target.is_dir():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read: dict[str, Any] = {"pretrained_model_name_or_path": directory, "gguf_file": files[0].name}
    try:
        packed = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**read)
    except Exception as error:  # A library's code raises anything.
        raise ValueError(f"{files[0]} is not read by transformers: {shorten_text(str(error), 300)}") from error
    config = packed.config
    config.__dict__.pop("quantization_config", None)
    model = type(packed)(config)
    model.load_state_dict(packed.state_dict())
    with atomic_directory(target) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return target


def local_origin(directory: Path) -> dict[str, str]:
    """Return what a record says of a directory on this machine: its path, and a code of path and machine.

    Anybody may name any path in a record: [`recorded_directory`] follows those with the code of this machine alone,
    which its name does not tell, and none from the Hub's cache.
    """
    path = str(directory.resolve())
    return {"path": path, "machine": _machine_code(path)}


def recorded_directory(origin: Mapping[str, Any], owner: Path) -> Path | None:
    """Return the directory that a record in `owner` names, if it was written on this machine; see [`local_origin`]."""
    path, is_cached = origin.get("path"), any(part.startswith("models--") for part in owner.resolve().parts)
    if is_cached or not isinstance(path, str) or origin.get("machine") != _machine_code(path):
        return None
    return Path(path) if os.path.isdir(path) else None


def _machine_code(path: str) -> str:
    identity = platform.node()
    with suppress(OSError):
        identity += Path("/etc/machine-id").read_text(encoding="ascii", errors="replace")
    return hashlib.sha256(f"{identity}\0{path}".encode("utf-8", "surrogateescape")).hexdigest()[:32]


def download_repository(repository: str, **options: Any) -> Path:
    """Download a Hub repository, without copies of the weights in formats that are never read.

    Not the files of a pipeline alone: the repository may hold a bare model, and every variant is converted.

    Args:
        repository: Hub id.
        **options: Options of `snapshot_download`.

    Raises:
        OSError: If the repository cannot be read.
    """
    from huggingface_hub import snapshot_download

    with checked_downloads(repository, options.get("cache_dir")):
        return Path(snapshot_download(repository, ignore_patterns=list(_NOT_DOWNLOADED), **options))


def download_pipeline(repository: str, **options: Any) -> Path:
    """Download a pipeline's own files from the Hub, and of those with several formats safetensors alone.

    Args:
        repository: Hub id.
        **options: Options of `DiffusionPipeline.download`; safetensors unless `use_safetensors` says otherwise.

    Raises:
        SourceNotFoundError: If it is neither a directory nor a Hub id.
        OSError: If there is no such repository.
    """
    if not is_hub_id(repository):
        raise SourceNotFoundError(f"{repository} is neither a directory nor a Hub id (owner/name).")
    from diffusers import DiffusionPipeline
    from huggingface_hub.errors import HfHubHTTPError

    with checked_downloads(repository, options.get("cache_dir")):
        try:
            return Path(DiffusionPipeline.download(repository, **{"use_safetensors": True, **options}))
        except OSError as error:
            # diffusers then looks in the cache, and says what is missing there.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, HfHubHTTPError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


@contextmanager
def checked_downloads(repository: str, cache_dir: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Compare large files that are downloaded with the SHA-256 that they are named by in the cache.

    `huggingface_hub` compares what `hf-xet` transfers; of what it downloads over plain HTTP, the size alone. A damaged
    file is removed, so that the next attempt downloads it again.

    Raises:
        OSError: If a file is damaged, or cannot be downloaded; the message names the repository.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils.sha import sha_fileobj

    folder = Path(cache_dir or constants.HF_HUB_CACHE).expanduser() / repo_folder_name(
        repo_id=repository, repo_type="model"
    )
    known, damaged = set(folder.glob("blobs/*")), []
    try:
        yield
    except OSError as error:
        if repository not in str(error):
            error.args = (f"{repository} on the Hub: {error}",)
        raise
    finally:
        # Also after an error: the next attempt takes what is there for intact.
        for blob in set(folder.glob("blobs/*")) - known:
            if re.fullmatch(r"[0-9a-f]{64}", blob.name):
                with blob.open("rb") as file:
                    intact = sha_fileobj(file).hex() == blob.name
                if not intact:
                    blob.unlink()
                    damaged.append(blob.name)
    if damaged:
        raise OSError(f"{', '.join(damaged)} of {repository} arrived damaged and was removed; run this again.")
