# SPDX-License-Identifier: Apache-2.0
"""Tiny model directories of transformers with a tokenizer or an image processor, and folders of data for them."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import PreTrainedTokenizerFast, ViTImageProcessor

from tests import tiny
from tests.integrations.transformers.tiny_models import IMAGE_SIZE, softmax_model


WORDS = "the block mixes its summaries and every token of it reads what was written before in the same row".split()


def tokenizer(maximum: int = 128) -> PreTrainedTokenizerFast:
    """Single characters, in the vocabulary of `model_directory`."""
    made = tiny.character_tokenizer()
    made.model_max_length = maximum
    return made


def model_directory(name: str, directory: Path) -> Path:
    """Tiny softmax model of a family that `tiny_models.py` knows, with its tokenizer or image processor."""
    model = softmax_model(name) if name.startswith("vit") else softmax_model(name, vocab_size=128)
    model.save_pretrained(directory)
    if name.startswith("vit"):
        ViTImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(directory)
    else:
        tokenizer().save_pretrained(directory)
    return directory


def text_folder(directory: Path, files: int = 6, paragraphs: int = 8) -> Path:
    """A folder of .txt files of random words."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for number in range(files):
        text = "\n\n".join(" ".join(draw.choices(WORDS, k=draw.randint(6, 20))) for _ in range(paragraphs))
        (directory / f"{number}.txt").write_text(text, encoding="utf-8")
    return directory
