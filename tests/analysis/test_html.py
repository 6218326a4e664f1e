# SPDX-License-Identifier: Apache-2.0
"""The HTML report: pictures, charts, hostile names, small pages, and their look on a phone."""

from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_hf import BlockLayout
from mhla_hf.analysis import InspectionReport, inspect_model, render_html, write_html
from mhla_hf.analysis.charts import bars, color, curves
from mhla_hf.analysis.pictures import heat_map, tiles
from mhla_hf.utils.machine import machine_facts
from tests.analysis.test_inspection import language_model, wan


HOSTILE = "<script>alert(1)</script><img src=http://example.com/x.png>\"'{{ 7 * 7 }}"
MODELS = {
    "wan": lambda: wan(mixing_heads="per_head", window="block"),
    "llama": language_model,
    "vit": lambda: language_model("vit"),
    "bert": lambda: language_model("bert"),
}


def report_of(make, **facts: object) -> InspectionReport:
    softmax, model, batches = make()
    for module in model.modules():
        if hasattr(module, "mixing"):
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
def test_page_is_self_contained(name):
    report = report_of(MODELS[name])
    page = render_html(report)
    elements = Elements(page)
    assert not {tag for tag, _ in elements.tags} & {"script", "link", "iframe", "object", "embed", "video", "base"}
    for _, attributes in elements.tags:
        for attribute, value in attributes.items():
            assert not attribute.startswith("on")
            if attribute in ("src", "href", "srcset", "data", "action"):
                assert value.startswith("data:image/png;base64,")
    assert "url(" not in page and "@import" not in page and "http" not in page.replace("http-equiv", "")
    pictures = [attributes["src"] for tag, attributes in elements.tags if tag == "img"]
    for source in pictures:
        with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
            image.verify()
    # For each layer its matrix, and one row on each frame; the layout once.
    layers = report.models[0].mhla_layers
    grid = layers[0].mixing.layout.grid
    frames = grid[0] if len(grid) == 3 else 1
    heads = len(layers[0].mixing.matrix) if layers[0].mixing.matrix.dim() == 3 else 0
    assert len(pictures) == len(layers) * (1 + frames + heads) + frames
    for layer in layers:
        mean = layer.attention.statistics["mhla"]["effective_rank"]["mean"]
        assert f"{mean:.1f} ±" in page and f"{layer.output_error['mean']:.3f}" in page
    assert len(page) < 300_000


def test_names_and_prompts_of_others_are_text():
    report = report_of(
        MODELS["wan"], location=HOSTILE, origin={"location": HOSTILE}, prompts=[HOSTILE], probe=HOSTILE, base=HOSTILE
    )
    report.models[0].component = report.models[0].notes = [HOSTILE]
    report.models[0].class_name = report.models[0].layers[0].name = HOSTILE
    elements = Elements(render_html(report))
    assert "script" not in {tag for tag, _ in elements.tags}
    assert all(attributes["src"].startswith("data:") for tag, attributes in elements.tags if tag == "img")
    assert elements.text.count("<script>alert(1)</script>") >= 5 and "{{ 7 * 7 }}" in elements.text


def test_page_without_probe_or_base():
    _, model, _ = wan()
    report = InspectionReport(
        "m", {"location": "m"}, [inspect_model(model)], machine=machine_facts(torch.device("cpu"))
    )
    text = Elements(render_html(report)).text
    assert "Only the weights" in text and "Effective rank" not in text and "Error of each layer" not in text


def test_pipelines_of_two_models_have_a_part_for_each():
    report, other = report_of(MODELS["wan"]), report_of(MODELS["vit"])
    report.models += other.models
    report.models[1].component = "transformer_2"
    text = Elements(render_html(report)).text
    assert text.count("Blocks on the token grid") == 2 and "transformer_2" in text


def test_own_block_of_a_sequence_is_marked():
    report = report_of(MODELS["llama"])
    layout = report.models[0].mhla_layers[0].mixing.layout
    size, length = layout.tile_lengths[0][1], layout.grid[0]
    page = render_html(report, block=1)
    assert f"margin-left:{round(100 * size / length, 3)}%;width:{round(100 * size / length, 3)}%" in page


def test_chosen_block(tmp_path):
    report = report_of(MODELS["wan"])
    write_html(report, tmp_path / "page.html", block=0)
    assert "block 0 is red" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="block=99 must be a block on the token grid"):
        write_html(report, tmp_path / "other.html", block=99)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_large_models_make_small_pages():
    """Thirty layers of twelve heads with 150 blocks, as Wan 1.3B has."""
    report = report_of(MODELS["wan"])
    model = report.models[0]
    layer = model.mhla_layers[0]
    layout = BlockLayout(grid=(21, 30, 52), blocks=(3, 5, 10))
    summary = layer.mixing
    object.__setattr__(summary, "layout", layout)
    object.__setattr__(summary, "matrix", torch.randn(12, 150, 150, generator=torch.Generator().manual_seed(0)))
    object.__setattr__(summary, "initial", torch.randn(150, 150))
    model.layers = [layer] * 30
    assert len(render_html(report)) < 4_000_000


def pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_heat_map_shows_sign_size_and_outline():
    values = np.array([[1.0, 0.0, -1.0], [0.5, -0.5, 2.0]])
    shown = pixels(heat_map(values, limit=1.0))
    assert shown.shape == (2, 3, 3)
    assert tuple(shown[0, 1]) == (247, 247, 247)
    assert tuple(shown[0, 0]) == tuple(shown[1, 2]) == (103, 0, 31) and tuple(shown[0, 2]) == (5, 48, 97)
    assert shown[1, 0, 0] > shown[1, 0, 2] and shown[1, 1, 2] > shown[1, 1, 0]
    inside = np.array([[False, True, True], [False, False, False]])
    shown = pixels(heat_map(values, scale=4, outlined=inside))
    outline = (shown == 17).all(-1)
    assert shown.shape == (8, 12, 3)
    assert outline[0, 4:].all() and outline[3, 4:].all() and outline[:4, 4].all() and outline[:4, 11].all()
    assert outline.sum() == 2 * 8 + 2 * 2
    assert not pixels(heat_map(np.zeros((2, 2)))).std()


def test_large_heat_maps_are_averages():
    values = np.zeros((512, 600))
    values[:, :300] = 1.0
    shown = pixels(heat_map(values))
    assert shown.shape == (256, 256, 3)
    assert (shown[:, :127] == (103, 0, 31)).all() and (shown[:, 130:] == 247).all()


def test_tiles_point_out_one_block():
    numbers = np.array([[[0, 1], [1, 0]], [[0, 1], [2, 3]]])
    shown = pixels(tiles(numbers, 2, scale=6))
    assert tuple(shown[7, 1]) == (214, 69, 65) and (shown[:, 5] == 255).all() and (shown[5] == 255).all()
    assert tuple(shown[0, 0]) == tuple(shown[7, 7]) != tuple(shown[0, 7])


def test_curves_are_where_they_belong():
    chart = curves({"start": ([0, 1, 2], [0.4, 0.2, 0.0]), "a": ([0, 1, 2], [1.0, -0.2, 0.5])}, dashed=["start"])
    first, second = (line["points"].split() for line in chart["lines"])
    ticks = {label: place for place, label in chart["vertical"]}
    assert float(first[2].split(",")[1]) == pytest.approx(ticks["0"])
    assert float(second[0].split(",")[1]) == pytest.approx(ticks["1"])
    assert [label for _, label in chart["horizontal"]] == [0, 1, 2]
    assert [place for place, _ in chart["horizontal"]] == [float(point.split(",")[0]) for point in first]
    for line in (first, second):
        for point in line:
            x, y = map(float, point.split(","))
            assert chart["left"] <= x <= chart["right"] and 0 <= y <= chart["bottom"]
    assert [line["dashed"] for line in chart["lines"]] == [True, False]
    assert len({color(index, 12) for index in range(12)}) == 12 and re.fullmatch("#[0-9a-f]{6}", color(0, 1))


def test_bars_are_relative_to_the_longest():
    rows = bars({"0": {"a": 4.0, "b": None}, "1": {"a": 1.0, "b": math.inf}}, digits=1)
    assert rows == [("0", [("a", 100.0, "4.0")]), ("1", [("a", 25.0, "1.0"), ("b", 100.0, "inf")])]
    assert bars({"0": {"a": 0.25}}, top=1.0) == [("0", [("a", 25.0, "0.25")])]
    assert bars({"0": {"a": 0.0}}) == [("0", [("a", 0.0, "0.00")])]


@pytest.mark.parametrize("name", ("wan", "llama"))
def test_page_fits_a_phone(name, page, tmp_path):
    path = tmp_path / "page.html"
    write_html(report_of(MODELS[name]), path)
    for width in (390, 320, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.evaluate("[...document.images].map(image => [image.complete, image.naturalWidth, image.width])")
        assert all(complete and natural > 0 for complete, natural, _ in sizes)
        assert page.evaluate("document.querySelector('svg').getBoundingClientRect().width") > 200
    # What the bars say is what their lengths are.
    lengths = page.evaluate(
        "[...document.querySelectorAll('.two .card:first-child .bar')].map(bar => [bar.children[0].offsetWidth,"
        " parseFloat(bar.children[1].textContent)])"
    )
    scale = max(length for length, _ in lengths) / max(value for _, value in lengths)
    assert all(abs(length - value * scale) < 3 for length, value in lengths)
