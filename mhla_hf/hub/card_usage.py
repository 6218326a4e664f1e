# SPDX-License-Identifier: Apache-2.0
"""Code in model cards that loads the model: with the package imported, by `load_pipeline`, and by trusted code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from .card_attention import call_size
from .markdown import literal
from .records import Records


_PROMPT = "A lighthouse on a cliff at sunset"
# By the end of the names of classes, and by task where several share it.
_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForImageClassification": "AutoModelForImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
}
_PROCESSOR_FILES = {
    "AutoTokenizer": ("tokenizer_config.json", "tokenizer.json"),
    "AutoImageProcessor": ("preprocessor_config.json", "processor_config.json"),
    "AutoProcessor": ("processor_config.json", "preprocessor_config.json"),
}
_TRUSTED = "Without importing the package: a small file of the repository does it, if its code is trusted"


def usage(
    records: Records, data: ModelCardData, location: str, prompt: str | None, arguments: Mapping[str, Any]
) -> list[dict[str, str]]:
    """The ways to load the model, each with a text and code.

    Args:
        records: What is known about the model.
        data: Metadata of its card.
        location: Repository or placeholder to load from.
        prompt: A prompt that suits it.
        arguments: Further arguments of the pipeline's call.
    """
    where = literal(location)
    if data.library_name == "sentence-transformers":
        return _sentences(where)
    if records.source.pipeline is not None:
        return _pipelines(records, data, where, prompt, arguments)
    component = records.parts[0].component
    if component.is_transformers:
        return _transformers(records.source.root, component.class_name, data, where, prompt)
    name = component.class_name
    return _ways(
        f"import mhla_hf\n\nmodel = mhla_hf.{name}.from_pretrained({where})",
        f"from diffusers import AutoModel\n\nmodel = AutoModel.from_pretrained({where}, trust_remote_code=True)",
        "With the package imported",
    )


def _ways(imported: str, trusted: str, text: str) -> list[dict[str, str]]:
    return [{"text": text, "code": imported}, {"text": _TRUSTED, "code": trusted}]


def _sentences(where: str) -> list[dict[str, str]]:
    load = "from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer({})"
    encode = '\nembeddings = model.encode(["A first sentence", "Another one"])'
    return _ways(
        f"import mhla_hf  # registers MHLA with transformers\n{load.format(where)}{encode}",
        load.format(f"{where}, trust_remote_code=True"),
        "With sentence-transformers",
    )


def _pipelines(
    records: Records, data: ModelCardData, where: str, prompt: str | None, arguments: Mapping[str, Any]
) -> list[dict[str, str]]:
    load = "from diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained({})"
    imported = f"import mhla_hf  # registers MHLA with diffusers\n{load.format(where)}"
    part = records.parts[0]
    size = call_size(records, part, part.towers[0]) or {}
    first = {
        "text-to-video": literal(prompt or _PROMPT),
        "text-to-image": literal(prompt or _PROMPT),
        "unconditional-image-generation": "class_labels=[0]",
    }.get(str(data.pipeline_tag))
    if first is not None:
        # DiT's pipeline makes images of one size.
        given = {} if first.startswith("class") else {**size, **arguments}
        call = ", ".join([first, *(f"{name}={value!r}" for name, value in given.items())])
        output, ending = ("video", "frames[0]") if "video" in str(data.pipeline_tag) else ("image", "images[0]")
        line = f"{output} = pipe({call}).{ending}"
        if len(line) > 100:
            lines = [first, *(f"{name}={value!r}" for name, value in given.items())]
            body = "".join(f"    {entry},\n" for entry in lines)
            line = f"{output} = pipe(\n{body}).{ending}"
        imported += f"\n{line}"
        if output == "video":
            imported = imported.replace(
                "import DiffusionPipeline\n", "import DiffusionPipeline\nfrom diffusers.utils import export_to_video\n"
            )
            imported += '\nexport_to_video(video, "video.mp4")'
    ways = _ways(imported, load.format(f"{where}, trust_remote_code=True"), "With the package imported")
    loaded = f"from mhla_hf import load_pipeline\n\npipe = load_pipeline({where})"
    ways.insert(1, {"text": "With `load_pipeline`, which also takes MHLA options", "code": loaded})
    return ways


def _transformers(
    root: Path, class_name: str, data: ModelCardData, where: str, prompt: str | None
) -> list[dict[str, str]]:
    task = str(data.pipeline_tag)
    named = next((auto for end, auto in _AUTO_CLASSES.items() if class_name.endswith(end) or task == end), "AutoModel")
    processor = "AutoTokenizer"
    if "image" in task:
        processor = "AutoProcessor" if "text" in task else "AutoImageProcessor"
    has_processor = any((root / name).is_file() for name in _PROCESSOR_FILES[processor])
    variable = {"AutoTokenizer": "tokenizer"}.get(processor, "processor")
    load = f"from transformers import {{}}\n\nmodel = {named}.from_pretrained({{}})"
    imported = load.format(", ".join(sorted([named, *([processor] if has_processor else [])])), where)
    if has_processor:
        imported += f"\n{variable} = {processor}.from_pretrained({where})"
    if has_processor and task == "text-generation":
        imported += (
            f'\ninputs = tokenizer({literal(prompt or "Once upon a time")}, return_tensors="pt")'
            "\nprint(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))"
        )
    return _ways(
        f"import mhla_hf  # registers MHLA with transformers\n{imported}",
        load.format(named, f"{where}, trust_remote_code=True"),
        "With the package imported",
    )
