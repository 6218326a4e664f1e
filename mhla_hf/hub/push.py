# SPDX-License-Identifier: Apache-2.0
"""`push_directory`: a converted model in one commit on the Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, metadata_load
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ..conversion.writing import byte_progress
from ..utils.hub import explained_hub_errors
from ..utils.locations import is_hub_id
from ..utils.messages import shorten_text
from ..utils.model_cards import CARD, is_own_card, read_card
from .card import card_for_repository, replacing_card
from .checks import check_directory
from .contents import Contents, collect_contents, is_working_file
from .metadata import card_data


logger = logging.getLogger(__name__)

LARGE_FILE = 64 * 2**20
"""Files of at least this many bytes are sent one at a time, smaller ones in parallel."""


def push_directory(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    commit_message: str | None = None,
    max_shard_size: int | str | None = None,
    benchmarks: Sequence[str | Path] = (),
    progress: bool = False,
) -> CommitInfo:
    """Pushes the directory of a pipeline or model with MHLA to the Hub.

    The directory is checked first, see [`check_directory`][mhla_hf.hub.checks.check_directory], and stays as it is.
    The repository gets a model card, unless a person wrote the one in the directory or repository, and a small file by
    which `trust_remote_code=True` loads the model with the installed package. Everything becomes visible in
    one commit. After an interruption, the same call resumes: large files that arrived are not sent again.

    Args:
        directory: The directory.
        repo_id: The repository, `owner/name`; created if it does not exist.
        private: Make a new repository private; the Hub's default if `None`.
        revision: The branch, created if it does not exist; by default the main one.
        create_pr: Open a pull request instead of committing to the branch.
        token: Access token; by default the stored one.
        commit_message: First line of the commit's message.
        max_shard_size: Largest weight file, in bytes or as `"5GB"`; by default that of the model's library. Weights in
            larger files are uploaded as several.
        benchmarks: Reports for the card, see [`model_card`][mhla_hf.hub.card.model_card].
        progress: Show progress bars on standard error.

    Returns:
        The commit, with `commit_url`, `pr_url` and `repo_url`.

    Raises:
        ValueError: If something is wrong with the directory or an argument, or `private` is requested for a public
            repository. Nothing is uploaded then.
        OSError: If the Hub refuses or cannot be reached.
    """
    root = Path(directory).expanduser()
    check_repository(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it.")
    api = HfApi(token=token)
    with explained_hub_errors(repo_id):
        # A token that is not accepted shows now, and not after all weights have been read.
        api.whoami()
    contents, warnings = prepare_push(
        root, repo_id, max_shard_size=max_shard_size, benchmarks=benchmarks, progress=progress
    )
    for warning in warnings:
        logger.warning("%s", warning)
    total = sum(size for part in contents.shardings for size in part.sizes.values())
    with ExitStack() as stack:
        with byte_progress(total, progress and total > 0) as (describe, advance):
            describe("sharding")
            stack.enter_context(contents.written(advance))
        stack.enter_context(explained_hub_errors(repo_id))
        stack.enter_context(_progress_bars(progress))
        _create(api, repo_id, private=private, revision=revision, create_pr=create_pr)
        message = commit_message or f"Upload {root.resolve().name} with mhla-hf"
        return _commit(api, repo_id, contents, message, revision=revision, create_pr=create_pr, progress=progress)


def prepare_push(
    directory: Path,
    repo_id: str,
    *,
    max_shard_size: int | str | None = None,
    benchmarks: Sequence[str | Path] = (),
    progress: bool = False,
) -> tuple[Contents, list[str]]:
    """Checks a directory and collects what would be uploaded, without the network.

    Args:
        directory: The directory.
        repo_id: See [`push_directory`].
        max_shard_size: See [`push_directory`].
        benchmarks: See [`push_directory`].
        progress: See [`push_directory`].

    Returns:
        The files, and warnings.

    Raises:
        ValueError: If something is wrong with the directory or an argument.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one that holds a pipeline or model.")
    if benchmarks and is_own_card(directory):
        raise ValueError(
            f"benchmarks have no effect: {directory / CARD} was written or edited by someone and is kept. Remove it "
            "to have one generated."
        )
    _check_card(directory / CARD)
    problems = check_directory(directory, skip=is_working_file, progress=progress)
    errors = [str(problem) for problem in problems if problem.level == "error"]
    if errors:
        more = f" And {len(errors) - 1} more: mhla-hf doctor lists them." if len(errors) > 1 else ""
        raise ValueError(f"{directory} is not pushed. {errors[0]}{more}")

    def make_card() -> str:
        return card_for_repository(directory, repo_id, benchmarks)

    contents = collect_contents(directory, max_shard_size=max_shard_size, card=make_card)
    warnings = [str(problem) for problem in problems]
    if card_data(directory).license is None:
        warnings.append(
            "README.md: the licence of the original is not known; add `license:` to the metadata at the card's top."
        )
    return contents, warnings


def check_repository(repo_id: str) -> None:
    """Raises `ValueError` unless a repository is named as `owner/name`."""
    if not is_hub_id(repo_id):
        raise ValueError(f"repo_id={repo_id!r:.100} is not a repository; name it as owner/name.")


def _check_card(path: Path) -> None:
    """Raises `ValueError` for a card that the Hub would refuse."""
    try:
        if path.is_file():
            metadata_load(path)
    except (ValueError, yaml.YAMLError) as error:
        reason = shorten_text(str(error), 300)
        raise ValueError(f"{path} cannot be read ({reason}); correct or remove it.") from error


def _create(api: HfApi, repo_id: str, *, private: bool | None, revision: str | None, create_pr: bool) -> None:
    """Creates the repository and the branch if they do not exist."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise ValueError(
            f"{repo_id} exists and is public: make it private in its settings, push to another one, or leave out "
            "--private (private=None)."
        )
    if revision is not None and not revision.startswith("refs/") and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)


def _commit(
    api: HfApi,
    repo_id: str,
    contents: Contents,
    message: str,
    *,
    revision: str | None,
    create_pr: bool,
    progress: bool,
) -> CommitInfo:
    """Uploads everything and commits it; large files go first, so that an interruption costs one of them at most."""
    where: dict[str, Any] = {"revision": revision, "create_pr": create_pr}
    present = api.list_repo_files(repo_id, revision=revision)
    _settle_card(api, repo_id, contents, present, revision)
    sizes = contents.sizes
    additions = []
    with byte_progress(sum(sizes.values()), progress) as (describe, advance):
        describe("hashing")
        for name, content in contents.files.items():
            additions.append(CommitOperationAdd(name, str(content) if isinstance(content, Path) else content))
            advance(sizes[name])
    for addition in additions:
        if sizes[addition.path_in_repo] >= LARGE_FILE:
            api.preupload_lfs_files(repo_id, [addition], **where)
    deletions = [CommitOperationDelete(name) for name in present if contents.replaces(name)]
    return api.create_commit(repo_id, [*deletions, *additions], commit_message=message, **where)


def _settle_card(api: HfApi, repo_id: str, contents: Contents, present: Sequence[str], revision: str | None) -> None:
    """Leaves out a generated card if a person wrote or edited the one in the repository."""
    generated = contents.files.get(CARD)
    if not isinstance(generated, bytes) or CARD not in present:
        return
    downloaded = Path(api.hf_hub_download(repo_id, CARD, revision=revision))
    card = replacing_card(generated.decode(), read_card(downloaded.parent))
    if card is not None:
        contents.files[CARD] = card.encode()
        return
    del contents.files[CARD]
    logger.warning(
        "%s of %s was written or edited there and is kept; remove it there to have one generated.",
        CARD,
        repo_id,
    )


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hides the progress bars of huggingface_hub unless they are wanted."""
    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
