# SPDX-License-Identifier: Apache-2.0
"""Repositories of the Hub of `hub_server.py`, with commits, branches, tags and pull requests, and its answers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".png", ".gif", ".mp4", ".npy", ".npz", ".pt", ".model")
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


@dataclass(frozen=True)
class File:
    """A file of a commit; `oid` names it in git, `sha256` in the storage of large files."""

    content: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """What listings say about it."""
        large = {"lfs": {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}} if self.lfs else {}
        return {"type": "file", "path": path, "size": len(self.content), "oid": self.oid, **large}


class Repository:
    """Commits by their hash, oldest first, and what branches, tags and pull requests point to.

    Args:
        kind: `"model"` or `"kernel"`.
        private: Seen by its owner alone.
    """

    def __init__(self, kind: str = "model", private: bool = False) -> None:
        self.kind, self.private = kind, private
        self.commits: dict[str, dict[str, File]] = {}
        self.references: dict[str, str] = {}
        self.add_commit("refs/heads/main", {".gitattributes": File(GIT_ATTRIBUTES)}, "initial commit")

    @property
    def files(self) -> dict[str, bytes]:
        """Contents on the main branch by path, without the file that the Hub itself adds."""
        return self.files_at("main")

    @property
    def branches(self) -> list[str]:
        return [name.removeprefix("refs/heads/") for name in self.references if name.startswith("refs/heads/")]

    def files_at(self, revision: str) -> dict[str, bytes]:
        commit = self.commits[self.find(revision)]
        return {path: file.content for path, file in commit.items() if path != ".gitattributes"}

    def add_commit(self, reference: str, files: dict[str, File], title: str) -> str:
        parent = self.references.get(reference)
        listing = [(path, file.oid) for path, file in sorted(files.items())]
        sha = hashlib.sha1(repr((len(self.commits), parent, listing, title)).encode()).hexdigest()
        self.commits[sha] = files
        self.references[reference] = sha
        return sha

    def reference(self, revision: str) -> str | None:
        """Full name of the branch, tag or pull request."""
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        return next((name for name in names if name in self.references), None)

    def find(self, revision: str) -> str:
        """The commit that a branch, tag, pull request or (shortened) hash names."""
        if name := self.reference(revision):
            return self.references[name]
        found = [sha for sha in self.commits if len(revision) >= 7 and sha.startswith(revision)]
        if not found:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]


@dataclass
class Answer:
    content: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """An answer that says what was wrong with the request."""

    def __init__(self, status: int, message: str, code: str = "", **headers: str) -> None:
        super().__init__(message)
        named = {"X-Error-Code": code} if code else {}
        self.answer = Answer({"error": message}, status, {"X-Error-Message": message, **named, **headers})
