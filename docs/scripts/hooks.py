# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs for links."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any


LOG = logging.getLogger("mkdocs.hooks.links")
DOCSTRING_REFERENCE = re.compile(r"\[(<code>[^<]*</code>)\]")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Leads links out of `docs/` to the repository, and warns of those that lead nowhere.

    They are relative (`../benchmarks/README.md`), so that they work in the repository as well. Without a `repo_url`
    they become plain text.
    """
    docs, repository = Path(config.docs_dir), Path(config.docs_dir).parent

    def resolve(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(docs.name, posixpath.dirname(page.file.src_uri), path))
        if place.startswith(f"{docs.name}/"):
            return match.group()
        if not (repository / place).exists():
            # A warning ends a build in strict mode.
            LOG.warning("%s links to %s, which the repository does not have", page.file.src_uri, place)
        if not config.repo_url:
            return text
        kind = "tree" if (repository / place).is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{place}{'#' + anchor if anchor else ''})"

    return LINK.sub(resolve, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drops the brackets of references in docstrings that name no target, such as [`MHLAConfig.replace`]."""
    return DOCSTRING_REFERENCE.sub(r"\1", html)
