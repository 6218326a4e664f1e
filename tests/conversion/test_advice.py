# SPDX-License-Identifier: Apache-2.0
"""The next step that a conversion advises."""

from mhla_hf.conversion.planning import ComponentReport
from mhla_hf.conversion.writing import ConversionReport, advice


def report(*classes):
    options = {"initialised": {"mixing": (1,)}, "mhla": {"blocks": [4, 4]}}
    parts = {name: ComponentReport("", name, **options) for name in classes}
    return ConversionReport("convert", "out", {"location": "model"}, parts)


def test_advice():
    text = advice(report("MHLAWanTransformer3DModel"))
    said = "The new parameters are untrained. Recover the model before you use it: mhla-hf recover MODEL OUTPUT, or"
    assert text.startswith(said) and text == advice(report("LlamaForCausalLM"))
    assert "mhla_hf.recover does not take it yet" in advice(report("MHLAWanAnimateTransformer3DModel"))
