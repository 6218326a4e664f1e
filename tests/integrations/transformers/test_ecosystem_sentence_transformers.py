# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers over encoders with MHLA."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModel

import mhla_hf  # noqa: F401
from mhla_hf.integrations.transformers.attaching import convert_transformers_model

from .mhla_models import mhla_modules
from .tiny_files import save_softmax


sentence_transformers = pytest.importorskip("sentence_transformers")

OPTIONS = {"block_size": 4}
TEXTS = ["a short text", "a text that is longer than the others, so they are padded", "another one"]


@pytest.fixture
def directory(tmp_path):
    from transformers import BertModel

    return save_softmax("bert", tmp_path / "softmax", BertModel)


def encoder(directory, **options):
    return sentence_transformers.SentenceTransformer(str(directory), device="cpu", **options)


def mhla_encoder(directory):
    # Options go to the configuration, which sentence-transformers loads before the model.
    return encoder(directory, model_kwargs={"attn_implementation": "mhla"}, config_kwargs={"mhla": OPTIONS})


def pooled(model, tokenizer, texts):
    """The mean of the tokens of each text, one text at a time."""
    rows = []
    for text in texts:
        with torch.no_grad():
            rows.append(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0))
    return torch.stack(rows)


def test_encoding(directory):
    model = mhla_encoder(directory)
    assert len(mhla_modules(model)) == 3
    reference = convert_transformers_model(AutoModel.from_pretrained(directory), OPTIONS)
    encoded = model.encode(TEXTS, batch_size=3, convert_to_tensor=True, show_progress_bar=False)
    expected = pooled(reference.eval(), model.tokenizer, TEXTS)
    torch.testing.assert_close(encoded, expected, atol=1e-5, rtol=1e-4)
    softmax = encoder(directory).encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    assert not torch.allclose(softmax, expected, atol=1e-2)


def test_saving_and_loading(directory, tmp_path):
    model = mhla_encoder(directory)
    model.save(str(tmp_path / "mhla"))
    assert "import mhla_hf" in json.loads((tmp_path / "mhla/config.json").read_text())["transformers_weights"]
    again = encoder(tmp_path / "mhla")
    assert len(mhla_modules(again)) == 3
    results = [each.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False) for each in (model, again)]
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_training(directory, tmp_path):
    datasets = pytest.importorskip("datasets")
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    model = mhla_encoder(directory)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    data = datasets.Dataset.from_dict({"anchor": TEXTS * 2, "positive": [text[::-1] for text in TEXTS] * 2})
    options = {"max_steps": 4, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    trainer = SentenceTransformerTrainer(
        model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "run"),
            learning_rate=1e-2,
            per_device_train_batch_size=6,
            logging_steps=1,
            **options,
        ),
        train_dataset=data,
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    reported = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert reported[-1] < reported[0]
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter.cpu())]
    assert sum(".mhla." in name for name in changed) == 9
