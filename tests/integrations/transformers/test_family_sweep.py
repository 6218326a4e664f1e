# SPDX-License-Identifier: Apache-2.0
"""The list of models says what the sweep finds; a sample in every run, all of it among the slow tests."""

from __future__ import annotations

import json

import pytest
import transformers

import mhla_hf
from mhla_hf.models.registry import TRANSFORMERS_DATA
from tests.command_line import run_command

from .family_sweep import MAPPINGS, SINCE, entries, names


STORED = json.loads(TRANSFORMERS_DATA.read_text(encoding="utf-8"))
SAMPLE = {
    "language model": (
        "cohere2 jamba mamba diffllama falcon bloom gptj mpt codegen gpt_neo exaone sarvam_moe apertus1p5_text".split()
    ),
    "encoder": "deberta deberta-v2 mpnet longformer".split(),
    "multi-modal": "gemma3 internvl qwen2_vl git apertus1p5".split(),
    "vision": ["vit", "swinv2"],
}
EVERY = [(kind, name) for kind in MAPPINGS for name in names(kind)]


def recorded(kind, name):
    """The entry of a model, and the one of its text part if that has one."""
    part = f"text part of {name}"
    own = (kind, name)
    models = [{**one, "note": SINCE.sub("", one["note"], count=1)} for one in STORED["models"]]
    return [one for one in models if (one["kind"], one["name"]) == own or one["note"] == part]


def check(kind, name):
    found = entries(kind, name)
    stored = recorded(kind, name)
    # What could not be built may need a package that is here and was not there.
    if transformers.__version__ == STORED["transformers"] and stored[0]["status"] != "not checked":
        assert found == stored, "run: python -m tests.integrations.transformers.family_sweep"
    assert found[0]["status"] in ("works", "refused", "not checked")
    if found[0]["status"] != "works":
        assert found[0]["note"] and "\n" not in found[0]["note"]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SAMPLE for name in SAMPLE[kind]])
def test_a_sample_of_the_list(kind, name):
    if name not in names(kind):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    check(kind, name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_the_whole_list(kind, name):
    check(kind, name)


@pytest.mark.skipif(transformers.__version__ != STORED["transformers"], reason="made with another transformers")
def test_the_list_is_complete():
    assert {(one["kind"], one["name"]) for one in STORED["models"]} >= set(EVERY)
    since = {one["name"]: SINCE.match(one["note"])[1] for one in STORED["models"] if SINCE.match(one["note"])}
    new = "apertus1p5 apertus1p5_text codegen exaone gptj sarvam_moe".split()
    assert {name: since.get(name) for name in new} == dict.fromkeys(new, "from transformers 5.24 on")
    languages = [one for one in STORED["models"] if one["kind"] == "language model" and one["status"] == "works"]
    assert len(languages) > 90


def test_the_command_lists_what_works_and_what_is_refused():
    listed = mhla_hf.supported_models()
    assert listed["mixtral"].kind == "language model" and listed["internvl"].kind == "multi-modal"
    refused = json.loads(run_command("models", "--refused", "--json").output)
    reasons = {one["name"]: one["note"] for one in refused}
    for name in ("gemma3", "gemma4", "shieldgemma2", "paligemma"):
        assert "the tokens of an image attend to each other" in reasons[name] and name not in listed
    assert "gemma3_text" in listed and "gemma4_text" in listed
    assert reasons["mamba"] == "it has no self-attention" and "mixtral" not in reasons
    assert "attention sinks" in run_command("models", "--refused").output
