# SPDX-License-Identifier: Apache-2.0
"""Errors of the Hub in one line, and checks of what was downloaded."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .messages import shorten_list, shorten_text


_LOG_IN = "log in with `hf auth login`"
_FILE = re.compile(r"/resolve/[^/]+/([^?]+)")


class HubError(OSError, ValueError):
    """What the Hub refuses, and a Hub that cannot be reached."""


@contextmanager
def hub_downloads(repository: str, cache_dir: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Explains errors of downloads from a repository, and checks the files that arrived.

    `huggingface_hub` compares the size of what it downloads over plain HTTP and nothing else. Here every new file is
    hashed; a damaged one is removed from the cache, so that the next attempt downloads it again.

    Args:
        repository: Hub id.
        cache_dir: Cache folder that the downloads go to.

    Raises:
        HubError: If the Hub refuses, cannot be reached, or files are damaged.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(cache_dir or constants.HF_HUB_CACHE).expanduser() / repo_folder_name(
        repo_id=repository, repo_type="model"
    )
    # File systems keep times less finely than the clock tells them.
    started = time.time() - 1
    try:
        with explained_hub_errors(repository):
            yield
    except Exception:
        _remove_damaged(folder, started)
        raise
    if damaged := _remove_damaged(folder, started):
        raise HubError(
            f"{shorten_list(damaged)} of {repository} arrived damaged: the checksum is not the Hub's. The download "
            "was removed; run this again to repeat it."
        )


@contextmanager
def explained_hub_errors(repository: str) -> Iterator[None]:
    """Raises errors of `huggingface_hub`, also those that other libraries wrap, as one line that says what to do.

    Args:
        repository: Hub id, for the messages.

    Raises:
        HubError: In place of such an error. Others are raised as they are.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # Of httpx or httpx2, by the version of huggingface_hub; errors of connections are not OSErrors.
    connection_error = HfHubHTTPError.__bases__[0]
    try:
        yield
    except HubError:
        raise
    except (OSError, ValueError, RuntimeError, connection_error) as error:
        if (reason := explain_hub_error(error, repository)) is None:
            raise
        raise HubError(reason) from error


def explain_hub_error(error: BaseException, repository: str) -> str | None:
    """Returns one line for an error of `huggingface_hub` or for one that it caused; `None` for other errors."""
    from huggingface_hub import errors

    connection_error = errors.HfHubHTTPError.__bases__[0]
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in chain:
        if isinstance(cause, errors.HfHubHTTPError):
            return _explain_answer(cause, repository)
    for cause in chain:
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return (
                f"{repository} is not in the cache, and HF_HUB_OFFLINE forbids to download it: unset HF_HUB_OFFLINE, "
                "or name a directory."
            )
        if isinstance(cause, connection_error):
            reason = shorten_text(str(cause) or type(cause).__name__)
            return (
                f"the connection to the Hub failed for {repository} ({reason}): check the network and run this again; "
                "files that were transferred completely are kept."
            )
    if any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in chain):
        return f"{repository} is not in the cache, and only earlier downloads may be used."
    return None


def _explain_answer(error: Any, repository: str) -> str:
    """The line for an answer of the Hub that is an error."""
    from huggingface_hub import errors

    status = error.response.status_code
    said = shorten_text(error.response.headers.get("X-Error-Message") or error.server_message or "")
    request = error.response.request
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access to {repository} is restricted: accept its conditions at {_page(request, repository)}, and "
            f"{_LOG_IN} as the account that did."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no such revision: check the name of the branch, tag or commit."
    if isinstance(error, errors.RemoteEntryNotFoundError):
        found = _FILE.search(str(request.url))
        return f"{repository} has no file {shorten_text(found[1])}." if found else f"{repository}: {said}."
    if status == 401 and "credentials" in said:
        return f"the Hub does not accept the access token: {_LOG_IN} again, or correct HF_TOKEN."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repository} is not on the Hub, or is private: check the name, or {_LOG_IN} as an account with access."
        )
    if status in (401, 403):
        access = "read" if request.method in ("GET", "HEAD") else "write to"
        because = f" ({said.rstrip('.')})" if said else ""
        return f"this account may not {access} {repository}{because}: {_LOG_IN} with a token that may."
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        return (
            f"the Hub limits the rate of requests (429): wait {f'{wait} seconds' if wait else 'some minutes'} and run "
            f"this again for {repository}; accounts that are logged in have a higher limit."
        )
    if status >= 500:
        return (
            f"the Hub is not available for {repository} (error {status}): run this again later; files that were "
            "transferred completely are kept."
        )
    return f"the Hub refuses the request for {repository} (error {status}): {said or shorten_text(str(error))}"


def _page(request: Any, repository: str) -> str:
    return f"{request.url.scheme}://{request.url.netloc.decode()}/{repository}"


def _remove_damaged(folder: Path, since: float) -> list[str]:
    """Removes files of a repository's cache that are newer than a time and not what their name says.

    The cache names contents by the SHA-256 of large files and git's SHA-1 of others.

    Returns:
        Names of the files in the repository.
    """
    damaged = {
        blob
        for blob in folder.glob("blobs/*")
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name)
        and blob.stat().st_mtime >= since
        and not _is_intact(blob)
    }
    names = set()
    for path in folder.glob("snapshots/*/**/*") if damaged else ():
        if path.is_symlink() and path.resolve() in {blob.resolve() for blob in damaged}:
            names.add(path.relative_to(folder / "snapshots").as_posix().partition("/")[2])
            path.unlink()
    for blob in damaged:
        blob.unlink(missing_ok=True)
    return sorted(names | {blob.name for blob in damaged if not names})


def _is_intact(blob: Path) -> bool:
    """True if a file of the cache has the checksum that is its name."""
    from huggingface_hub.utils.sha import sha_fileobj

    with blob.open("rb") as file:
        if len(blob.name) == 64:
            return sha_fileobj(file).hex() == blob.name
        # Mirrors of the Hub answer with the SHA-1 of the content alone.
        plain, git = hashlib.sha1(usedforsecurity=False), hashlib.sha1(usedforsecurity=False)
        git.update(b"blob %d\0" % blob.stat().st_size)
        while chunk := file.read(2**20):
            plain.update(chunk)
            git.update(chunk)
    return blob.name in (plain.hexdigest(), git.hexdigest())
