# SPDX-License-Identifier: Apache-2.0
"""Flux and Chroma: grids, reference images, checkpoints of other options, and the shared checks."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_hf import MHLAChromaTransformer2DModel, MHLAFluxTransformer2DModel
from mhla_hf.families.flux import grid_of
from tests import tiny_joint
from tests.families.checks import ModelChecks
from tests.families.joint_checks import JointCase, JointChecks
from tests.families.model_case import text_mask


class FluxCase(JointCase):
    """Two blocks with two streams and two with a single stream; the height and width of the grid."""

    config = tiny_joint.FLUX
    make_pipeline = staticmethod(tiny_joint.flux_pipeline)
    full_size = {"height": 1024, "width": 1024}
    is_padded = False
    block_class = "FluxTransformerBlock"
    mhla_class = MHLAFluxTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    sizes = ((4, 6), (2, 12), (5, 7))


class ChromaCase(FluxCase):
    """As Flux; the text is padded."""

    config = tiny_joint.CHROMA
    make_pipeline = staticmethod(tiny_joint.chroma_pipeline)
    full_size = {"height": 1024, "width": 1024}
    is_padded = True
    block_class = "ChromaTransformerBlock"
    mhla_class = MHLAChromaTransformer2DModel

    def inputs(self, size=0, *, batch=1, **options):
        inputs = super().inputs(size, batch=batch, **options)
        image, text = (len(inputs[f"{kind}_ids"]) for kind in ("img", "txt"))
        mask = torch.cat([text_mask(batch, text), torch.ones(batch, image, dtype=torch.long)], dim=1)
        return {**inputs, "attention_mask": mask.bool()}


def test_reference_images_are_refused():
    case = FluxCase()
    model, inputs = case.make_mhla(), case.inputs()
    reference, columns = (
        inputs["img_ids"].clone(),
        inputs["img_ids"].unflatten(0, (4, 6)).transpose(0, 1).flatten(0, 1),
    )
    reference[:, 0] = 1
    for ids in (torch.cat([inputs["img_ids"], reference]), reference, columns, inputs["img_ids"][:-1]):
        with pytest.raises(ValueError, match="take the tokens of one image, row by row: no reference images"):
            model(**{**inputs, "img_ids": ids})
    adapter = {"joint_attention_kwargs": {"ip_hidden_states": [inputs["hidden_states"]]}}
    with pytest.raises(ValueError, match="take no ip_hidden_states"):
        model(**inputs, **adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grids_of_flux(dtype):
    for height, width in ((128, 128), (1, 200), (200, 1), (96, 171), (3, 513), (513, 3)):
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        ids = torch.stack([torch.zeros(height, width), rows.expand(height, width), columns.expand(height, width)], -1)
        assert grid_of(ids.flatten(0, 1).to(dtype)) == grid_of(ids.flatten(0, 1)[None].to(dtype)) == (height, width)


def test_the_grid_may_be_given():
    case = FluxCase()
    model = case.make_mhla()
    for size, grid in enumerate(case.sizes):
        expected = case.run(model, size)
        with torch.no_grad():
            given = model(**case.inputs(size), joint_attention_kwargs={"grid": grid, "scale": 1.0}).sample
        assert torch.equal(given, expected)


@pytest.mark.parametrize("case", [FluxCase(), ChromaCase()], ids=lambda case: case.upstream.__name__)
@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((4, 5), r"grid=\(4, 5\) has 20 tokens, but img_ids has 24"),
        ((5, 6), r"grid=\(5, 6\) has 30 tokens, but img_ids has 24"),
        ((24,), r"grid=\(24,\) has 1 axes, but the grid has 2"),
        ((-4, -6), "must be one to three positive integers"),
        ((4.0, 6), "must be one to three positive integers"),
        (None, "grid=None must be one to three positive integers"),
    ],
)
def test_a_given_grid_has_the_tokens_of_the_image(case, grid, message):
    with pytest.raises(ValueError, match=message):
        case.make_mhla()(**case.inputs(), joint_attention_kwargs={"grid": grid})


def test_other_text_than_in_the_checkpoint_is_refused(tmp_path):
    case = FluxCase()
    for stored, given, message in (
        ("softmax", "block", "leave out 4 trained MHLA weight"),
        ("block", "softmax", "stored under text='block', but the mhla options ask for 'softmax'"),
    ):
        case.make_mhla(text=stored).save_pretrained(tmp_path / stored)
        with pytest.raises(ValueError, match=message):
            case.mhla_class.from_pretrained(tmp_path / stored, mhla={"text": given})


def test_a_checkpoint_without_the_scale_of_the_normalizer(tmp_path, caplog):
    """As those made before there was one: 1 is what they have been trained with."""
    model = FluxCase().make_mhla()
    for module in model.mhla_modules().values():
        module.normalizer_scale.data.fill_(1.0)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if not name.endswith("normalizer_scale")}, file)
    caplog.clear()
    loaded = type(model).from_pretrained(tmp_path)
    assert "newly initialised" not in caplog.text
    torch.testing.assert_close(FluxCase().run(loaded), FluxCase().run(model))


class TestFlux(FluxCase, JointChecks, ModelChecks):
    # Reading it from positions would break the graph.
    compiled_inputs = staticmethod(lambda size: {"joint_attention_kwargs": {"grid": size}})


class TestChroma(ChromaCase, JointChecks, ModelChecks):
    compiled_inputs = TestFlux.compiled_inputs
