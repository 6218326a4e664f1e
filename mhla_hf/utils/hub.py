# SPDX-License-Identifier: Apache-2.0
"""Downloads from the Hub: its own errors in one type, and checksums of what arrived."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .messages import LIST_LENGTH, one_line, shorten_list


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
