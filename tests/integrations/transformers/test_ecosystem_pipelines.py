# SPDX-License-Identifier: Apache-2.0
"""transformers' pipelines over ordinary directories, asked for MHLA by `model_kwargs`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, pipeline

import mhla_hf  # noqa: F401
from mhla_hf.integrations.transformers.attaching import convert_transformers_model

from .mhla_models import UNSERVED, mhla_modules
from .test_generation import recompute
from .tiny_files import save_softmax


SMALL_BLOCKS = {"block_size": 4}


def mhla_pipeline(task, directory, options, **kwargs):
    return pipeline(
        task,
        model=str(directory),
        model_kwargs={"attn_implementation": "mhla", "mhla": options},
        device="cpu",
        **kwargs,
    )


@pytest.mark.parametrize("options", [None, SMALL_BLOCKS], ids=["defaults", "small blocks"])
def test_text_generation(tmp_path, options):
    directory = save_softmax("llama", tmp_path)
    generate = mhla_pipeline("text-generation", directory, options)
    assert len(mhla_modules(generate.model)) == 3
    texts = ["Hello, world", "a longer text, so that the other is padded"]
    results = generate(texts, batch_size=2, max_new_tokens=12, do_sample=False)
    reference = convert_transformers_model(AutoModelForCausalLM.from_pretrained(directory), options)
    for text, result in zip(texts, results, strict=True):
        tokens = generate.tokenizer(text, return_tensors="pt").input_ids
        tokens, _ = recompute(reference, tokens, torch.ones_like(tokens), steps=12)
        assert result[0]["generated_text"] == generate.tokenizer.decode(tokens[0], skip_special_tokens=True)


@pytest.mark.parametrize("name", [name for name in ("vit", "dinov2") if name not in UNSERVED])
def test_image_classification(tmp_path, name):
    from transformers import Dinov2ForImageClassification, ViTForImageClassification

    classes = {"vit": ViTForImageClassification, "dinov2": Dinov2ForImageClassification}
    directory = save_softmax(name, tmp_path, classes[name], num_labels=4)
    classify = mhla_pipeline("image-classification", directory, {"blocks": [2, 2]})
    assert len(mhla_modules(classify.model)) == 3
    pixels = np.random.default_rng(0).integers(0, 255, (2, 20, 24, 3), dtype=np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    results = classify(images, batch_size=2, top_k=4)
    reference = AutoModelForImageClassification.from_pretrained(directory)
    convert_transformers_model(reference, {"blocks": [2, 2]})
    with torch.no_grad():
        expected = reference(**classify.image_processor(images, return_tensors="pt")).logits.softmax(-1)
    for row, result in zip(expected, results, strict=True):
        scores = {entry["label"]: entry["score"] for entry in result}
        assert [scores[f"LABEL_{index}"] for index in range(4)] == pytest.approx(row.tolist(), abs=1e-5)


def test_a_saved_model_needs_no_argument(tmp_path):
    directory = save_softmax("llama", tmp_path / "softmax")
    first = mhla_pipeline("text-generation", directory, SMALL_BLOCKS)
    first.save_pretrained(tmp_path / "mhla")
    second = pipeline("text-generation", model=str(tmp_path / "mhla"), device="cpu")
    assert len(mhla_modules(second.model)) == 3
    results = [each("Hello, world", max_new_tokens=12, do_sample=False) for each in (first, second)]
    assert results[0] == results[1]
