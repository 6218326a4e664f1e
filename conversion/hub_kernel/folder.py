# SPDX-License-Identifier: Apache-2.0
"""The kernel's folder: sources as kernel-builder takes them, and builds as the `kernels` library loads them.

build.toml            the configuration of kernel-builder
torch-ext/<name>/     the sources, without the namespace of their operators
build/torch-<backend> what is loaded: the sources, the namespace, `metadata.json`
README.md, CARD.md    the card on the Hub, and what kernel-builder makes it from
tests/                tests of the builds
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from mhla_hf.utils.destinations import claim_destination
from mhla_hf.utils.files import write_staged_json
from mhla_hf.utils.messages import shorten_list, shorten_value

from .sources import OPERATORS_MODULE, PACKAGE, collect_sources


ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).resolve().parent / "template"
# Of the kernel's interface: raised when that changes so that callers break. The Hub has a branch for each. 0 is for
# kernels whose interface still changes.
KERNEL_VERSION = 0
# Plain torch serves a CPU. The Triton kernels are written for NVIDIA GPUs.
BACKENDS = ("cpu", "cuda")
LICENSE = "Apache-2.0"
DEFAULT_REPOSITORY = "OWNER/mhla"

# First line of `build.toml`, by which a folder is known as one of ours.
_MARK = "# Made by `python -m conversion.hub_kernel` of mhla_hf; changes are lost when it is made again."
_ENTRIES = {"LICENSE", "README.md", "CARD.md", "build.toml", "build", "torch-ext", "tests"}
_CACHES = {"__pycache__", ".pytest_cache"}
_REPOSITORY = re.compile(r"[\w.-]+/([a-z][-a-z0-9]*[a-z0-9])")


def export_kernel(folder: str | Path, *, repo_id: str | None = None, package: Path = ROOT / PACKAGE) -> None:
    """Writes the package's operator as a kernel for the `kernels` library.

    The same sources give the same folder. The namespace of its operators is made from their text, so that builds of
    different sources can be loaded beside each other and beside the package.

    Args:
        folder: The folder to write. An earlier one is replaced; any other must be empty.
        repo_id: Repository on the Hub that it is written for, `owner/name`; the kernel has its name. Without it the
            kernel is called mhla.
        package: Folder of the package.

    Raises:
        ValueError: If the folder has other content, the repository's name is no name of a kernel, or a module needs
            what a kernel cannot have.
        OSError: If the folder cannot be written.
    """
    match = _REPOSITORY.fullmatch(DEFAULT_REPOSITORY if repo_id is None else repo_id)
    if match is None:
        raise ValueError(
            f"repo_id={shorten_value(repo_id)} is not of the form owner/name with a name of lower-case letters, "
            "digits and dashes, as kernels have."
        )
    name = match[1]
    module_name = name.replace("-", "_")
    template = TEMPLATE / "kernel"
    sources = collect_sources(package, template, module_name)
    if any(path.split("/")[0] in (module_name, f"{module_name}.py") for path in sources):
        raise ValueError(f"repo_id={repo_id} gives the kernel the name of one of its own modules; choose another one.")
    version = re.search(
        r'^__version__ = "([^"]+)"', (package / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert version is not None
    sources["__init__.py"] = sources["__init__.py"].replace('__version__ = "0"', f"__version__ = {version[1]!r}")
    folder = Path(folder)
    with claim_destination(folder, overwrite=_is_ours(folder)) as claimed, claimed.staging() as staged:
        _write_project(staged, name, repo_id, sources)
        for backend in BACKENDS:
            _write_build(staged / "build" / f"torch-{backend}", name, backend, sources)


def _is_ours(folder: Path) -> bool:
    """Whether a folder was made by [`export_kernel`], and nothing was added to it."""
    configuration = folder / "build.toml"
    if not configuration.is_file() or not configuration.read_text("utf-8", errors="replace").startswith(_MARK):
        return False
    if others := {path.name for path in folder.iterdir()} - _ENTRIES - _CACHES:
        raise ValueError(
            f"{folder} has {shorten_list(others)} beside the kernel that is to be replaced; move it away, or choose "
            "another folder."
        )
    return True


def _write_project(folder: Path, name: str, repo_id: str | None, sources: dict[str, str]) -> None:
    """Writes what kernel-builder starts from, and what people read."""
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    hub = "" if repo_id is None else f'\n[general.hub]\nrepo-id = "{repo_id}"\n'
    (folder / "build.toml").write_text(
        f'{_MARK}\n[general]\nname = "{name}"\nversion = {KERNEL_VERSION}\nedition = 5\nlicense = "{LICENSE}"\n'
        f"backends = [{backends}]\n{hub}\n[torch-noarch]\n",
        encoding="utf-8",
    )
    _write_sources(folder / "torch-ext" / name.replace("-", "_"), sources)
    card = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    card = card.replace(DEFAULT_REPOSITORY, repo_id or DEFAULT_REPOSITORY)
    card = card.replace("version=0", f"version={KERNEL_VERSION}")
    for file in ("README.md", "CARD.md"):
        (folder / file).write_text(card, encoding="utf-8")
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    (folder / "tests").mkdir()
    for test in sorted((TEMPLATE / "tests").glob("*.py")):
        (folder / "tests" / test.name).write_bytes(test.read_bytes())


def _write_build(folder: Path, name: str, backend: str, sources: dict[str, str]) -> None:
    """Writes one build variant: the sources, the namespace of their operators, and the metadata."""
    module_name = name.replace("-", "_")
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()
    # Also the name under which the library imports the kernel.
    identifier = f"_{module_name}_{backend}_{digest[:10]}"
    values = {"{identifier}": identifier, "{module_name}": module_name}
    files = {f"{OPERATORS_MODULE}.py": "operators.py", f"{module_name}/__init__.py": "compatibility.py"}
    generated = {}
    for path, source in files.items():
        text = (TEMPLATE / source).read_text(encoding="utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        generated[path] = text
    _write_sources(folder, {**sources, **generated})
    metadata = {
        "id": identifier,
        "name": name,
        "version": KERNEL_VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": _digests(folder)},
    }
    write_staged_json(folder / "metadata.json", metadata)


def _write_sources(folder: Path, sources: dict[str, str]) -> None:
    for path, text in sources.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _digests(folder: Path) -> dict[str, str]:
    """The digest of every file, as the library checks them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }
