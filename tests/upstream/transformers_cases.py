# SPDX-License-Identifier: Apache-2.0
"""Model testers for the mixins in transformers' source distribution, which has no test files of single models.

Collected by `run.py` alone, with the root of the unpacked distribution on the path: `tests` is transformers' own.
"""

from __future__ import annotations

import inspect
import unittest

import torch
import transformers

from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin


class TextModelTester:
    """Tiny model and inputs of a text family, with what the mixins ask of a tester."""

    prefix = ""
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    batch_size, seq_length, is_training = 13, 7, True
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 512,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    num_hidden_layers, hidden_size, num_attention_heads, vocab_size, num_labels = 2, 32, 4, 99, 3

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    @property
    def config_class(self) -> type:
        return getattr(transformers, f"{self.prefix}Config")

    @property
    def causal_lm_class(self) -> type | None:
        return getattr(transformers, f"{self.prefix}ForCausalLM", None)

    @property
    def base_model_class(self) -> type:
        return getattr(transformers, f"{self.prefix}Model")

    @classmethod
    def model_classes(cls) -> tuple[type, ...]:
        return tuple(getattr(transformers, f"{cls.prefix}{head}") for head in cls.heads)

    def get_config(self):
        known = inspect.signature(self.config_class.__init__).parameters
        return self.config_class(**{name: value for name, value in self.sizes.items() if name in known})

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        # Zero is padding, which some of the mixins' masks would have to know of.
        input_ids = input_ids.clamp(min=3)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


class LlamaModelTester(TextModelTester):
    prefix = "Llama"


class Qwen3ModelTester(TextModelTester):
    prefix = "Qwen3"


class BertModelTester(TextModelTester):
    prefix = "Bert"
    heads = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class ViTModelTester:
    """Tiny model and inputs of a vision transformer."""

    batch_size, image_size, patch_size, num_channels, is_training = 13, 30, 2, 3, True
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 4
    seq_length = (30 // 2) ** 2 + 1
    # Of masked image modelling.
    mask_length = seq_length - 1
    num_masks = mask_length // 2

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def get_config(self):
        return transformers.ViTConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_channels=self.num_channels,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
        )

    def prepare_config_and_inputs_for_common(self):
        pixels = floats_tensor([self.batch_size, self.num_channels, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixels}


class _TextModelTest(ModelTesterMixin):
    # The mixin with the tests of `generate` is not in the source distribution.
    test_generation_tester_mixin_inheritance = None

    model_tester_class: type[TextModelTester]
    model_tester = None

    def setUp(self) -> None:
        self.model_tester = self.model_tester_class(self)
        self.all_model_classes = self.model_tester_class.model_classes()


class LlamaModelTest(_TextModelTest, TrainingTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
    model_tester_class = LlamaModelTester


class Qwen3ModelTest(_TextModelTest, TrainingTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
    model_tester_class = Qwen3ModelTester


class BertModelTest(_TextModelTest, unittest.TestCase):
    model_tester_class = BertModelTester


class ViTModelTest(ModelTesterMixin, unittest.TestCase):
    test_resize_embeddings = False
    # Image models have no table of embeddings.
    test_model_get_set_embeddings = None

    def setUp(self) -> None:
        self.model_tester = ViTModelTester(self)
        self.all_model_classes = (transformers.ViTModel, transformers.ViTForImageClassification)
