# SPDX-License-Identifier: Apache-2.0
"""`push_directory`: a converted model in one commit on the Hub."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub import utils as hub

from ..models.directory import CONVERSION_RECORD, TRAINING_RECORD, ModelDirectory
from ..models.stub import stub_files
from ..models.weight_files import DIFFUSERS_FILES, PICKLES, TRANSFORMERS_FILES
from ..utils.files import list_files, parse_json, read_json_value
from ..utils.locations import PIPELINE_INDEX, check_exists, is_hub_id
from ..utils.model_cards import CARD, is_own_card, read_card
from .card import card_data, card_for_repository, replacing_card
from .checks import DirectoryCheck


logger = logging.getLogger(__name__)

_WORKING_FILES = [
    "work/*", "checkpoint-*/*", "checkpoints/*", "*.lock", "*.tmp",
    # Written by accelerate and by the Trainer of transformers.
    "optimizer*.bin", "optimizer*.pt", "scheduler*.bin", "scheduler*.pt", "scaler.pt", "random_states_*.pkl",
    "rng_state*.pth", "training_args.bin", "trainer_state.json", "global_step*/*",
    # Written by trackers.
    "wandb/*", "runs/*", "logs/*", "mlruns/*", "events.out.tfevents*", "*/events.out.tfevents*", "*.log",
    # Hidden files, keys and tokens.
    ".*", "*/.*", "*.env", "*.key", "*.pem", "token", "token.txt",
]  # fmt: skip
_RECORDS = (CONVERSION_RECORD, TRAINING_RECORD, "report.json")
_ABSOLUTE = re.compile(r"(?:[A-Za-z]:[\\/]|/[^/\n]+/|~/)[^\n]*")
_CONFIGURATION = re.compile(rf"(.*/)?(\w*config\.json|{re.escape(PIPELINE_INDEX)})")
# Fields of configurations that say what was loaded; some are of earlier versions of the libraries.
_LOCATIONS = frozenset({"_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_file"})


@dataclass
class Contents:
    """Files of a repository.

    Attributes:
        files: Path of each file, or its contents where they differ from those in the directory, by path in the
            repository.
        left_out: Working files in the directory, which are not uploaded.
    """

    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its path in the repository."""
        return {
            name: content.stat().st_size if isinstance(content, Path) else len(content)
            for name, content in sorted(self.files.items())
        }

    def replaces(self, name: str) -> bool:
        """Return whether a file of the repository holds weights of a model here under a name that is not in use."""
        path = PurePosixPath(name)
        if name in self.files or (path.parent / "config.json").as_posix() not in self.files:
            return False
        return any(names.match(Path(path.name)) for names in (DIFFUSERS_FILES, TRANSFORMERS_FILES))


def push_directory(
    directory: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    commit_message: str | None = None,
    benchmarks: Sequence[str | Path] = (),
    progress: bool = False,
) -> CommitInfo:
    """Push the directory of a pipeline or model with MHLA to the Hub.

    The directory is checked first, see [`check_directory`][mhla_hf.hub.checks.check_directory], and is not changed.
    The repository gets a model card, unless a person wrote the one in the directory or repository, and a small file by
    which `trust_remote_code=True` loads the model with the installed package. Only files that were checked are
    uploaded, in one commit. After an interruption, the same call resumes: large files that arrived are not sent again.

    Args:
        directory: The directory.
        repo_id: The repository, `owner/name`; created if it does not exist.
        private: Make a new repository private; the Hub's default if `None`.
        revision: The branch, created if it does not exist; by default the main one.
        create_pr: Open a pull request instead of committing to the branch.
        token: Access token; by default the stored one.
        commit_message: First line of the commit's message.
        benchmarks: Files for the card, see [`model_card`][mhla_hf.hub.card.model_card].
        progress: Show progress bars on standard error.

    Returns:
        The commit, with `commit_url`, `pr_url` and `repo_url`.

    Raises:
        ValueError: If something is wrong with the directory or an argument, or `private` is requested for a public
            repository. Nothing is uploaded then.
        OSError: If the Hub refuses, or cannot be reached; see `huggingface_hub.errors`.
    """
    check_exists(directory, "directory")
    root = Path(directory).expanduser()
    api = HfApi(token=token)
    # A token that is not accepted shows now, and not after all weights have been read.
    api.whoami()
    contents, warnings = prepare_push(root, repo_id, benchmarks=benchmarks, progress=progress)
    for warning in warnings:
        logger.warning("%s", warning)
    with ExitStack() as stack:
        if not progress and not hub.are_progress_bars_disabled():
            hub.disable_progress_bars()
            stack.callback(hub.enable_progress_bars)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise ValueError(
                f"{repo_id} exists and is public: make it private in its settings, push to another one, or leave out "
                "--private (private=None)."
            )
        if revision is not None and not revision.startswith("refs/") and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        present = api.list_repo_files(repo_id, revision=revision)
        _settle_card(api, repo_id, contents, present, revision)
        # Not `upload_folder`, which may split a folder into several commits.
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(name) for name in present if contents.replaces(name)),
                *(CommitOperationAdd(name, content) for name, content in contents.files.items()),
            ],
            commit_message=commit_message or f"Upload {root.resolve().name} with mhla-hf",
            revision=revision,
            create_pr=create_pr,
        )


def prepare_push(
    directory: str | Path, repo_id: str, *, benchmarks: Sequence[str | Path] = (), progress: bool = False
) -> tuple[Contents, list[str]]:
    """Check a directory and collect what would be uploaded, without the network; arguments as in [`push_directory`].

    Configurations name the stub for `trust_remote_code=True`, which is added.

    Returns:
        The files, and warnings.

    Raises:
        ValueError: If something is wrong with the directory or an argument.
    """
    directory = Path(directory).expanduser()
    if not is_hub_id(repo_id):
        raise ValueError(f"repo_id={repo_id!r:.100} is not a repository; name it as owner/name.")
    if benchmarks and is_own_card(directory):
        raise ValueError(f"benchmarks: {directory / CARD} was written or edited by someone and is kept.")
    files = list_files(directory) if directory.is_dir() else []
    uploaded = list(hub.filter_repo_objects(files, ignore_patterns=_WORKING_FILES, key=Path.as_posix))
    problems = DirectoryCheck(directory, uploaded, progress=progress).problems
    errors = [str(problem) for problem in problems if problem.level == "error"]
    errors += [
        f"{path} is a pickle, which can run code when read; remove it, or keep its tensors as safetensors."
        for path in uploaded
        if path.suffix in PICKLES
    ]
    if errors:
        more = f" And {len(errors) - 1} more: mhla-hf doctor lists them." if len(errors) > 1 else ""
        raise ValueError(f"{directory} is not pushed. {errors[0]}{more}")
    stub = stub_files(ModelDirectory.read(directory).select_mhla()[0])
    contents = Contents(
        {path.as_posix(): directory / path for path in uploaded},
        [path.as_posix() for path in files if path not in uploaded],
    )
    for name in [name for name in contents.files if name.endswith(".json")]:
        content = read_json_value(directory / name, "the file")
        public = _public(name, parse_json(stub[name], name) if name in stub else content)
        if public != content:
            contents.files[name] = (json.dumps(public, indent=2, sort_keys=True) + "\n").encode()
    contents.files |= {name: text.encode() for name, text in stub.items() if name.endswith(".py")}
    if not is_own_card(directory):
        contents.files[CARD] = card_for_repository(directory, repo_id, benchmarks).encode()
    warnings = [str(problem) for problem in problems]
    if card_data(directory).license is None:
        warnings.append(
            "README.md: the licence of the original is not known; write the card with mhla-hf card --license, or add "
            "`license:` to the metadata at its top."
        )
    return contents, warnings


def _public(name: str, content: Any) -> Any:
    """Shorten absolute paths in records, and in fields of configurations that say what was loaded."""
    if PurePosixPath(name).name not in _RECORDS:
        return _shortened(content, _LOCATIONS) if _CONFIGURATION.fullmatch(name) else content
    public = _shortened(content, None)
    if isinstance(public, dict) and isinstance(public.get("source"), dict):
        # Paths and the machine mean nothing to others.
        public["source"] = {key: value for key, value in public["source"].items() if key not in ("path", "machine")}
    return public


def _shortened(value: Any, fields: frozenset[str] | None) -> Any:
    """Replace absolute paths by their last part, everywhere or in some fields of JSON."""
    if isinstance(value, dict):
        return {
            key: _shortened(entry, None if fields is None or key in fields else fields) for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_shortened(entry, fields) for entry in value]
    if fields is None and isinstance(value, str) and _ABSOLUTE.fullmatch(value):
        return PureWindowsPath(value).name or value
    return value


def _settle_card(api: HfApi, repo_id: str, contents: Contents, present: Sequence[str], revision: str | None) -> None:
    """Leave out a generated card if a person wrote or edited the one in the repository."""
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
        "%s of %s was written or edited there and is kept; remove it there to have one generated.", CARD, repo_id
    )
