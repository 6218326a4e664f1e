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
    assert "mhla-hf calibrate out" in text and "mhla-hf recover model OUTPUT" in text
    assert "or fine-tune the model." in advice(report("LlamaForCausalLM"))
