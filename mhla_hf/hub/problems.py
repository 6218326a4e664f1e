# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a directory, noted while it is checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..utils.messages import shorten_text


_LENGTH = 600


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a directory.

    Attributes:
        file: The file or folder, relative to the directory; `"."` for the directory itself.
        message: One line that says what is wrong and what to do.
        level: `"error"` for what cannot be loaded or used, `"warning"` for the rest.
    """

    file: str
    message: str
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{'the directory' if self.file == '.' else self.file}: {self.message}"


@dataclass
class Findings:
    """The problems of a directory.

    Attributes:
        root: The directory.
        problems: What was found so far.
    """

    root: Path
    problems: list[Problem] = field(default_factory=list)

    def error(self, path: Path, message: str) -> None:
        """Notes an error in a file or folder below `root`."""
        self._note(path, message, "error")

    def warning(self, path: Path, message: str) -> None:
        """Notes a warning about a file or folder below `root`."""
        self._note(path, message, "warning")

    def _note(self, path: Path, message: str, level: Literal["error", "warning"]) -> None:
        file = path.relative_to(self.root).as_posix()
        # Messages of loaders name files by their whole path, and most begin with that.
        text = shorten_text(message.replace(f"{self.root}/", "").replace(str(self.root), "the directory"), _LENGTH)
        called = "the directory" if path == self.root else re.escape(file)
        opening = re.match(rf"[\w' ]*{called}:? ", text)
        problem = Problem(file, text if opening is None else text[opening.end() :], level)
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Notes an exception as an error in a file, and continues."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.error(path, str(error) or type(error).__name__)
        # Libraries meet contents of another kind than they expect with any exception.
        except Exception as error:
            self.error(path, f"cannot be checked ({type(error).__name__}: {shorten_text(str(error), 300)}).")

    def sorted(self) -> list[Problem]:
        """The problems, errors first, by file."""
        return sorted(self.problems, key=lambda problem: (problem.level, problem.file, problem.message))
