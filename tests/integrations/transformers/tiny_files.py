# SPDX-License-Identifier: Apache-2.0
"""Ordinary directories of tiny softmax models, with a tokenizer or an image processor made on the spot."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .tiny_models import FAMILIES, IMAGE_SIZE, VOCABULARY, sharpen


SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
CHARACTERS = string.ascii_lowercase + string.digits + " .,:;!?'-()\n" + string.ascii_uppercase


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters with as many tokens as the tiny models have.

    Args:
        name: key of `FAMILIES`; encoders get `[CLS]` and `[SEP]` around the text.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS)[:VOCABULARY])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    encoder = FAMILIES[name].kind == "encoder"
    if encoder:
        characters.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if encoder else {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        model_max_length=128,
        padding_side="right" if encoder else "left",
        **roles,
    )


def save_softmax(name: str, directory: Path, model_class: Any = None, **overrides: Any) -> Path:
    """Saves a tiny softmax model as anyone would, its tokenizer or image processor next to it.

    Args:
        name: key of `FAMILIES`.
        directory: where to.
        model_class: another class than the family's own, with the same configuration.
        **overrides: replace entries of the configuration.
    """
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = (model_class or family.model_class)(family.config(**overrides))
    sharpen(model)
    model.save_pretrained(directory)
    if family.kind == "vision":
        from transformers import ViTImageProcessor

        ViTImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(directory)
    else:
        tokenizer(name).save_pretrained(directory)
    return directory
