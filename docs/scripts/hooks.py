# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs for lists of models, links, images, and spaces between numbers and units."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mhla_hf.models.registry import MHLA_CLASSES


LOG = logging.getLogger("mkdocs.hooks.links")
DOCSTRING_REFERENCE = re.compile(r"\[(<code>[^<]*</code>)\]")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
IMAGE = re.compile(r"(!\[[^\]]*\]\()(\.\./[^)\s]+)\)")
# A number, and the unit or the sign after it. Code and tags are matched first, and stay.
BREAKABLE = re.compile(
    r"(<(?:pre|code|script)\b.*?</(?:pre|code|script)>|<[^>]*>)"
    r"|(?<=\d) (?=[×%]|(?:ms|s|[kMG]B)\b)|(?<=×) (?=\d)",
    re.DOTALL,
)


def on_files(files: Any, config: Any) -> Any:
    """Takes images of the repository that pages show, such as plots of `benchmarks/results`, into the site."""
    from mkdocs.structure.files import File

    docs = Path(config.docs_dir)
    pages = [(file.src_uri, Path(file.abs_src_path)) for file in files.documentation_pages()]
    for source, path in pages:
        for _, target in IMAGE.findall(path.read_text(encoding="utf-8")):
            place = _place(docs, source, target)
            image = docs.parent / place
            if not place.startswith(f"{docs.name}/") and image.is_file() and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(image)))
    return files


def with_models(markdown: str) -> str:
    """Puts the MHLA classes of diffusers in the place that a page has for them."""
    return markdown.replace("{{ models }}", "\n".join(f"::: mhla_hf.{name}" for name in MHLA_CLASSES))


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Leads links out of `docs/` to the repository, and warns of those that lead nowhere.

    They are relative (`../benchmarks/README.md`), so that they work in the repository as well. Without a `repo_url`
    they become plain text.
    """
    docs, repository = Path(config.docs_dir), Path(config.docs_dir).parent
    source = page.file.src_uri

    def show(match: re.Match[str]) -> str:
        place = _place(docs, source, match[2])
        if place.startswith(f"{docs.name}/"):
            return match.group()
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(source) or '.')})"

    def resolve(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        place = _place(docs, source, path)
        if place.startswith(f"{docs.name}/"):
            return match.group()
        if not (repository / place).exists():
            # A warning ends a build in strict mode.
            LOG.warning("%s links to %s, which the repository does not have", source, place)
        if not config.repo_url:
            return text
        kind = "tree" if (repository / place).is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{place}{'#' + anchor if anchor else ''})"

    return LINK.sub(resolve, IMAGE.sub(show, with_models(markdown)))


def on_page_content(html: str, **_: Any) -> str:
    """Drops the brackets of references in docstrings that name no target, and keeps numbers beside their units.

    Such references look like [`MHLAConfig.replace`].
    """
    html = DOCSTRING_REFERENCE.sub(r"\1", html)
    return BREAKABLE.sub(lambda match: match[1] or "\N{NO-BREAK SPACE}", html)


def _place(docs: Path, source: str, target: str) -> str:
    """Path in the repository that a page's relative link leads to."""
    return posixpath.normpath(posixpath.join(docs.name, posixpath.dirname(source), target))
