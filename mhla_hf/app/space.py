# SPDX-License-Identifier: Apache-2.0
"""The application as a folder for a Space of the Hugging Face Hub."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..hub.metadata import TAGS, card_data
from ..models.source import CONVERSION_RECORD, read_source
from ..utils.destinations import claim_destination
from ..utils.files import list_files
from ..utils.locations import PIPELINE_INDEX, is_hub_id, local_directory
from .limits import Limits
from .models import originals_of


MODEL_FOLDER, BASE_FOLDER = "model", "base"

# What a Space's repository holds at most.
_MOST_BYTES = 1_000_000_000
_LICENSE = "apache-2.0"

_PROGRAM = '''"""Compares an MHLA model with the model that it was made from."""

from pathlib import Path

from mhla_hf.app import Limits, create_app, serve


HERE = Path(__file__).resolve().parent

page = create_app({model}, {base}, limits=Limits({limits}))

if __name__ == "__main__":
    serve(page)
'''

_TEXT = """
Compares a model with Multi-Head Linear Attention (MHLA, [arXiv 2601.07832](https://arxiv.org/abs/2601.07832)) with the
model that it was converted from: the outputs of both for the same prompt and seed, their times, the mixing weights,
and the speed of attention by length.

To run it elsewhere:

```bash
pip install -r requirements.txt
python app.py
```
"""


def export_space(
    destination: str | Path,
    model: str | Path | None = None,
    base: str | Path | None = None,
    *,
    limits: Limits | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a folder that is a Space: the application of one model.

    Models on the Hub are named in it; those in directories are copied into it.

    Args:
        destination: The folder to make.
        model: An MHLA model, directory or Hub id; `None` for the demo's pipeline, calibrated when the Space starts.
        base: Its original; by default the one that its records name.
        limits: Bounds of what visitors may ask for.
        overwrite: Replace `destination`.

    Returns:
        The folder.

    Raises:
        ValueError: If the destination has content, the model is not MHLA or too large to be copied, or its original
            is not found.
        OSError: If a file cannot be read or written.
    """
    target = Path(destination).expanduser()
    given = asdict(limits or Limits())
    usual = asdict(Limits())
    changed = ", ".join(f"{name}={value!r}" for name, value in given.items() if value != usual[name])
    with claim_destination(target, overwrite=overwrite) as claimed, claimed.staging() as staging:
        parts, metadata = _models(staging, model, base)
        title = f"MHLA: {Path(str(model)).name}" if model is not None else "MHLA: moving digits"
        program = _PROGRAM.format(limits=changed, **parts)
        (staging / "app.py").write_text(program, encoding="utf-8")
        (staging / "requirements.txt").write_text(f"mhla-hf[app]=={__version__}\n", encoding="utf-8")
        (staging / "README.md").write_text(_card(title, metadata), encoding="utf-8")
    return target


def _models(staging: Path, model: str | Path | None, base: str | Path | None) -> tuple[dict[str, str], dict[str, Any]]:
    """The models as the program names them, and what the card says about them; directories are copied."""
    metadata: dict[str, Any] = {"models": [], "license": _LICENSE}
    names = {"model": "None", "base": "None"}
    for key, location in (("model", model), ("base", base)):
        if location is not None and local_directory(location, key) is None:
            names[key] = repr(str(location))
            metadata["models"].append(str(location))
    if model is None or names["model"] != "None":
        if base is not None and names["base"] == "None":
            raise ValueError(f"base {base} is a directory; beside a model on the Hub, give the base's Hub id.")
        return names, metadata
    root = Path(model).expanduser()
    source = read_source(root, str(model))
    originals = originals_of(source, base)
    _copy(root, list_files(root), staging / MODEL_FOLDER, model)
    names["model"] = f"HERE / {MODEL_FOLDER!r}"
    card = card_data(root)
    metadata |= {"license": card.license, "models": [card.base_model] if isinstance(card.base_model, str) else []}
    location, first = next(iter(originals.values()))
    if names["base"] == "None" and not is_hub_id(location) and not _is_packaged(first.folder):
        # Only what differs from the model: its denoisers.
        folder = first.folder if first.is_transformers else first.folder.parent
        folders = [original.folder for _, original in originals.values()]
        files = [file for file in list_files(folder) if any((folder / file).is_relative_to(own) for own in folders)]
        files += [Path(PIPELINE_INDEX)] if (folder / PIPELINE_INDEX).is_file() else []
        _copy(folder, files, staging / BASE_FOLDER, location)
        names["base"] = f"HERE / {BASE_FOLDER!r}"
    return names, metadata


def _is_packaged(folder: Path) -> bool:
    """True for a folder that comes with this package, which the Space has too."""
    return folder.resolve().is_relative_to(Path(__file__).resolve().parent.parent)


def _copy(root: Path, files: list[Path], target: Path, named: str | Path) -> None:
    # The work folder of a recovery is for resuming it.
    files = [file for file in files if file.parts[0] != "work" or not (root / CONVERSION_RECORD).is_file()]
    size = sum((root / file).stat().st_size for file in files)
    if size > _MOST_BYTES:
        raise ValueError(
            f"{named} has {size / 1e9:.1f} GB, more than a Space holds: publish it (mhla-hf push) and give its Hub id."
        )
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, target / file)


def _card(title: str, metadata: dict[str, Any]) -> str:
    from huggingface_hub import SpaceCardData

    data = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=version("gradio"),
        app_file="app.py",
        models=sorted(set(metadata["models"])) or None,
        license=metadata["license"],
        tags=list(TAGS),
    )
    return f"---\n{data.to_yaml()}\n---\n{_TEXT}"
