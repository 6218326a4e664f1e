# SPDX-License-Identifier: Apache-2.0
"""The command that a conversion advises takes the converted model."""

import json

import pytest

from mhla_hf.conversion.report import ComponentReport, ConversionReport, advice
from mhla_hf.models.registry import FAMILIES
from mhla_hf.training.families import family_of_class


OPTIONS = {"blocks": [4, 4], "mixing_init": "cos"}


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (36, 16), (16, 32), (16, None)])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_advice_is_what_training_takes(family, inputs, outputs, tmp_path):
    config = {"in_channels": inputs, "out_channels": outputs}
    config = {name: value for name, value in config.items() if value is not None}
    check(family, config, tmp_path)


def test_no_training_of_distilled_models_is_advised(tmp_path):
    check(FAMILIES["SanaTransformer2DModel"], {"in_channels": 32, "guidance_embeds": True}, tmp_path)


def check(family, config, directory):
    (directory / "config.json").write_text(json.dumps(config))
    part = ComponentReport(family.upstream, family.mhla_class, initialised={"mixing": {"shape": [1]}}, mhla=OPTIONS)
    text = advice(ConversionReport("convert", directory, {}, {"transformer": part}))
    try:
        family_of_class(family.mhla_class).objective.check_config(config)
        is_trained = True
    except ValueError:
        is_trained = False
    assert (f"with mhla-hf train {family.name}." in text) == is_trained
    assert is_trained or "fine-tune the model" in text


def test_no_advice_without_new_parameters(tmp_path):
    part = ComponentReport("WanTransformer3DModel", "MHLAWanTransformer3DModel")
    assert advice(ConversionReport("convert", tmp_path, {}, {"transformer": part})) is None
