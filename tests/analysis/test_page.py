# SPDX-License-Identifier: Apache-2.0
"""Figures and the HTML page of an inspection: what they show, hostile names, size, and the look on a phone."""

from __future__ import annotations

import copy
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import mhla_hf
from mhla_hf import BlockLayout
from mhla_hf.analysis import InspectionReport, inspect_model, mixing_figure
from mhla_hf.analysis.plots import decay_figure, frames_shown, mixing_parts, render_html, weights_on_grid
from mhla_hf.analysis.statistics import DistanceDecay, middle_block
from mhla_hf.utils.machine import machine_facts
from tests.analysis.test_inspection import language_model, wan
from tests.families.cases import FluxCase


LAYOUTS = {
    "sequence": BlockLayout(grid=(50,), block_size=(16,)),
    "image-with-class-token": BlockLayout(grid=(6, 9), blocks=(2, 3), num_prefix_tokens=1),
    "video": BlockLayout(grid=(3, 4, 6), blocks=(3, 2, 2)),
    "long-video": BlockLayout(grid=(21, 4, 4), blocks=(21, 2, 2)),
}
HOSTILE = "<script>alert(1)</script><img src=http://example.com/x.png>\"'{{ 7 * 7 }}$x^$"


def flux():
    case = FluxCase()
    softmax = case.make(case.upstream)
    model = mhla_hf.convert(copy.deepcopy(softmax), case.options).eval()
    return softmax, model, [case.inputs()]


MODELS = {
    "flux": flux,
    "wan": lambda: wan(mixing_heads="per_head", window="block"),
    "llama": language_model,
    "vit": lambda: language_model("vit"),
}


@pytest.fixture(scope="module")
def reports():
    return {name: report_of(make) for name, make in MODELS.items()}


def report_of(make, moved: bool = True, **facts: object) -> InspectionReport:
    softmax, model, batches = make()
    for module in model.modules():
        if moved and hasattr(module, "mixing"):
            with torch.no_grad():
                module.mixing += 0.2 * torch.randn(module.mixing.shape, generator=torch.Generator().manual_seed(0))
    inspected = inspect_model(model, batches, base=softmax, component="transformer")
    values = {"location": "model", "origin": {"location": "model"}, "probe": "random inputs", "base": "base"}
    return InspectionReport(models=[inspected], machine=machine_facts(torch.device("cpu")), **{**values, **facts})


class Elements(HTMLParser):
    """Tags with their attributes, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", MODELS)
def test_page_is_self_contained(name, reports):
    page = render_html(reports[name])
    elements = Elements(page)
    assert not {tag for tag, _ in elements.tags} & {"script", "link", "iframe", "object", "embed", "video", "base"}
    for _, attributes in elements.tags:
        for attribute, value in attributes.items():
            assert not attribute.startswith("on")
            if attribute in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert value.startswith(("data:image/png;base64,", "#"))
    assert "@import" not in page
    model = reports[name].models[0]
    # Two figures of mixing weights for each layer, their decay, four statistics, errors, and the share of a text.
    drawn = sum(tag == "svg" for tag, _ in elements.tags)
    assert drawn == 2 * len(model.mhla_layers) + 6 + (name == "flux")
    assert ("Attention to the text" in elements.text) == (name == "flux")
    for layer in model.mhla_layers:
        mean = layer.attention.statistics["mhla"]["effective_rank"]["mean"]
        assert f"{mean:.1f} ±" in page and f"{layer.output_error['mean']:.3f}" in page
        assert f">layer {layer.index}</text>" in page
    assert len(page) < 500_000


def test_names_and_prompts_of_others_are_text():
    facts = {"location": HOSTILE, "origin": {"location": HOSTILE}, "prompts": [HOSTILE], "probe": HOSTILE}
    report = report_of(MODELS["wan"], **facts, base=HOSTILE)
    report.models[0].component = HOSTILE
    report.models[0].class_name = report.models[0].layers[0].name = HOSTILE
    elements = Elements(render_html(report))
    assert not {tag for tag, _ in elements.tags} & {"script", "img"}
    assert elements.text.count("<script>alert(1)</script>") >= 4 and "{{ 7 * 7 }}" in elements.text


def test_untrained_models_and_pages_without_a_probe_say_so(reports):
    _, model, _ = wan()
    machine = machine_facts(torch.device("cpu"))
    text = Elements(
        render_html(InspectionReport("m", {"location": "m"}, [inspect_model(model)], machine=machine))
    ).text
    assert "Only the weights" in text and "Effective rank" not in text and "Error of each layer" not in text
    assert "Untrained since its conversion" in text
    # Weights that are the same in all layers are drawn once, without what has changed.
    assert text.count("mixing matrix,") == 1 and "initial weights, untrained since conversion" in text
    assert "change of" not in text and "by distance" not in text
    assert "Untrained" not in Elements(render_html(reports["wan"])).text


@pytest.mark.parametrize(("count", "named"), [(2, [0, 1]), (12, [0, 11])])
def test_decay_has_a_curve_for_each_layer_beside_the_initial_one(count, named):
    decays = {layer: DistanceDecay([0, 1, 2], [0.5, 0.2, 0.1 * layer]) for layer in range(count)}
    figure = decay_figure(DistanceDecay([0, 1, 2], [0.4, 0.3, 0.2]), decays)
    initial, *curves = figure.axes[0].lines
    np.testing.assert_array_equal(initial.get_ydata(), [0.4, 0.3, 0.2])
    assert [list(curve.get_ydata()) for curve in curves] == [decay.mean for decay in decays.values()]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["initial", *(f"layer {layer}" for layer in named)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("block", (None, 2))
def test_figures_show_matrix_row_and_block(layout, block):
    mixing = torch.randn(2, layout.num_blocks, layout.num_blocks)
    figure = mixing_figure({3: mixing}, layout, block=block)
    block = middle_block(layout) if block is None else block
    matrix, *frames, _ = figure.axes
    np.testing.assert_allclose(matrix.images[0].get_array(), mixing.mean(0))
    assert matrix.get_ylabel() == "layer 3"
    shown = frames_shown(layout, block)
    assert len(frames) == len(shown) <= 6
    expected = mixing.mean(0)[block][layout.block_of_token][layout.num_prefix_tokens :]
    on_grid = expected.reshape((1,) * (3 - len(layout.grid)) + layout.grid)
    for axis, frame in zip(frames, shown):
        np.testing.assert_allclose(axis.images[0].get_array(), on_grid[frame])
    # The outline covers the tokens of the block in the frames shown.
    of_block = weights_on_grid(torch.eye(layout.num_blocks)[block], layout)[shown]
    areas = [patch.get_width() * patch.get_height() for axis in frames for patch in axis.patches]
    assert sum(areas) == of_block.sum() > 0
    # The same as two figures; an axis of a grid without a frame is empty.
    left, right = mixing_parts(mixing, layout, block=block)
    np.testing.assert_allclose(left.axes[0].images[0].get_array(), mixing.mean(0))
    drawn = [axis.images[0].get_array() for axis in right.axes if axis.images and axis.get_title()]
    np.testing.assert_allclose(np.stack(drawn), on_grid[shown])
