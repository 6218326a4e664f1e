# SPDX-License-Identifier: Apache-2.0
"""What diffusers hangs onto attention layers: processors, guidance, caches, offloading; beside softmax models."""

import copy

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.utils.modeling import compute_module_sizes
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    PixArtSigmaPAGPipeline,
    PyramidAttentionBroadcastConfig,
    SanaPAGPipeline,
)
from diffusers.guiders import PerturbedAttentionGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.models.attention_processor import (
    AttnProcessor,
    PAGCFGIdentitySelfAttnProcessor2_0,
    PAGIdentitySelfAttnProcessor2_0,
)

from mhla_hf import convert
from tests import tiny_images
from tests.families.cases import (
    ChromaCase,
    DiTCase,
    FluxCase,
    HunyuanVideo15Case,
    HunyuanVideoCase,
    LTX2Case,
    LTX23Case,
    LTXCase,
    PixArtCase,
    QwenImageCase,
    SanaCase,
    SanaVideoCase,
    SkyReelsCase,
    WanAnimateCase,
    WanCase,
    WanVACECase,
)
from tests.families.model_case import OPTION_SETS, relative_error


CASES = [WanCase(), DiTCase(), PixArtCase(), SanaCase(), SanaVideoCase(), WanVACECase(), SkyReelsCase()]
CASES += [LTXCase(), LTX2Case()]
JOINT = [HunyuanVideoCase(), HunyuanVideo15Case(), QwenImageCase(), FluxCase(), ChromaCase()]
# diffusers' hooks that skip attention fail on those of LTX and LTX-2, of the stock model too.
GUIDED = [case for case in CASES if not isinstance(case, LTXCase)]
WITH_PROCESSORS = [case for case in [*CASES, *JOINT] if not isinstance(case, DiTCase)]


def named(case):
    return type(case).__name__


def pair(case, **options):
    """A softmax model and the same converted."""
    stock = case.make(case.upstream)
    return stock, convert(copy.deepcopy(stock), {**case.options, **options})


# Processors


@pytest.mark.parametrize("case", WITH_PROCESSORS, ids=named)
class TestProcessors:
    def test_get_and_set(self, case):
        stock, model = pair(case, layers=[1])
        for changed in (stock, model):
            layers = {
                name.removesuffix(".processor"): processor for name, processor in changed.attn_processors.items()
            }
            for name, processor in layers.items():
                module = changed.get_submodule(name)
                assert module.get_processor() is processor
                if hasattr(module, "mhla"):
                    with pytest.raises(ValueError, match="AttnProcessor would ignore them"):
                        module.set_processor(AttnProcessor())
                    assert module.get_processor() is processor
                    replacement = type(processor)()
                else:
                    replacement = AttnProcessor()
                module.set_processor(replacement)
                assert module.get_processor() is replacement
        with pytest.raises(ValueError, match="AttnProcessor would ignore them"):
            model.set_attn_processor(dict.fromkeys(model.attn_processors, AttnProcessor()))
        own = {name: copy.copy(processor) for name, processor in model.attn_processors.items()}
        model.set_attn_processor(dict(own))
        assert model.attn_processors == own


# Perturbed-attention guidance


def draw(pipeline, size, **options):
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "use_resolution_binning": False, "max_sequence_length": 16, **options}
    generator = torch.Generator().manual_seed(0)
    return pipeline(
        "a blue seven", height=size[0], width=size[1], output_type="np", generator=generator, **options
    ).images


@pytest.mark.parametrize("scale", [1.0, 4.5], ids=["alone", "with_guidance"])
def test_sana_with_perturbed_attention_draws_the_original_before_training(scale):
    """Its attention is linear, and a fresh MHLA model computes the same."""
    images = []
    for pipeline in (tiny_images.sana_pipeline(), convert(tiny_images.sana_pipeline(), {"blocks": [2, 3]})):
        perturbed = SanaPAGPipeline(**pipeline.components, pag_applied_layers="transformer_blocks.1")
        before = pipeline.transformer.attn_processors
        options = {"guidance_scale": scale, "complex_human_instruction": None}
        images.append(draw(perturbed, (128, 192), pag_scale=3.0, **options))
        assert pipeline.transformer.attn_processors == before
    plain = draw(perturbed, (128, 192), pag_scale=0.0, **options)
    np.testing.assert_allclose(images[1], images[0], atol=1e-4)
    assert np.abs(images[1] - plain).max() > 1e-3


@pytest.mark.parametrize("scale", [1.0, 4.5], ids=["alone", "with_guidance"])
@pytest.mark.parametrize("options", ["everything", "hybrid"])
def test_pixart_with_perturbed_attention(options, scale):
    pipeline = convert(tiny_images.pixart_pipeline(sigma=True), {"blocks": [2, 2], **OPTION_SETS[options]})
    perturbed = PixArtSigmaPAGPipeline(**pipeline.components, pag_applied_layers=["blocks.0", "blocks.1"])
    before = pipeline.transformer.attn_processors
    images = [draw(perturbed, (16, 24), pag_scale=pag_scale, guidance_scale=scale) for pag_scale in (4.0, 0.0)]
    assert np.isfinite(images).all() and np.abs(images[0] - images[1]).max() > 1e-3
    assert pipeline.transformer.attn_processors == before


@pytest.mark.parametrize("options", ["default", "everything"])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_perturbed_batch(parts, options):
    """The last part is perturbed as by the guider's hook, the others are as without."""
    case = PixArtCase()
    model = case.make_mhla(**OPTION_SETS[options])
    inputs = {
        name: value if name == "added_cond_kwargs" else torch.cat([value] * parts)
        for name, value in case.inputs().items()
    }
    plain = case.run(model)
    processor = {2: PAGIdentitySelfAttnProcessor2_0, 3: PAGCFGIdentitySelfAttnProcessor2_0}[parts]()
    before = model.attn_processors
    for attention in model._self_attentions():
        attention.processor = processor
    with torch.no_grad():
        output = model(**inputs).sample
    model.set_attn_processor(before)
    apply_layer_skip(model, LayerSkipConfig([0, 1], skip_attention=False, skip_attention_scores=True, skip_ff=False))
    perturbed = case.run(model)
    torch.testing.assert_close(output, torch.cat([plain] * (parts - 1) + [perturbed]))
    assert relative_error(perturbed, plain) > 1e-4


def test_other_processors_set_by_attribute_are_refused():
    case = PixArtCase()
    model = case.make_mhla()
    model._self_attentions()[0].processor = AttnProcessor()
    with pytest.raises(ValueError, match="AttnProcessor would ignore them"):
        case.run(model)


# Guiders and layer skipping


@pytest.mark.parametrize("case", GUIDED, ids=named)
@pytest.mark.parametrize(
    "skipped", [{"skip_ff": False}, {"skip_attention": True, "skip_ff": True}], ids=["attention", "layer"]
)
def test_models_that_skip_all_attention_are_the_same(skipped, case):
    """With MHLA in one layer, so that skipping either kind works."""
    stock, model = pair(case, layers=[1])
    plain = case.run(model, case.upstream_size)
    apply_layer_skip(model, LayerSkipConfig([0, 1], **skipped))
    output = case.run(model, case.upstream_size)
    if isinstance(case, SanaCase) and skipped["skip_ff"]:
        # diffusers does not know its own class of SANA's layers.
        with pytest.raises(ValueError, match="not registered"):
            apply_layer_skip(stock, LayerSkipConfig([0, 1], **skipped))
    else:
        apply_layer_skip(stock, LayerSkipConfig([0, 1], **skipped))
        torch.testing.assert_close(output, case.run(stock, case.upstream_size))
    assert relative_error(output, plain) > 1e-4


# Without Flux: diffusers looks for an attribute that its attention does not have.
@pytest.mark.parametrize("case", [*GUIDED, *JOINT[:3]], ids=named)
@pytest.mark.parametrize("kind", ["skip_layer", "perturbed"])
def test_guiders(kind, case):
    if kind == "skip_layer":
        guider = SkipLayerGuidance(
            skip_layer_config=LayerSkipConfig([1], skip_attention=True, skip_ff=False),
            skip_layer_guidance_start=0.0,
            skip_layer_guidance_stop=1.0,
        )
    else:
        guider = PerturbedAttentionGuidance(
            perturbed_guidance_layers=[1], perturbed_guidance_start=0.0, perturbed_guidance_stop=1.0
        )
    model = case.make_mhla()
    plain = case.run(model)
    guider.set_state(step=2, num_inference_steps=10, timestep=torch.tensor(500))
    outputs = []
    for _ in range(guider.num_conditions):
        guider.prepare_models(model)
        outputs.append(case.run(model))
        guider.cleanup_models(model)
    conditional, unconditional, changed = outputs
    assert torch.equal(conditional, plain) and torch.equal(unconditional, plain)
    assert relative_error(changed, plain) > 1e-4
    assert torch.equal(case.run(model), plain)


@pytest.mark.parametrize("case", [WanCase(), HunyuanVideo15Case()], ids=named)
def test_a_perturbed_layer_without_own_parameters_is_the_original_one(case):
    """Values go straight to the output projection, whatever attention computes otherwise."""
    stock, model = pair(case)
    config = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}
    for each in (stock, model):
        apply_layer_skip(each, LayerSkipConfig([0, 1], **config))
    torch.testing.assert_close(case.run(model), case.run(stock))


# Caches


CLOCK = {"timestep": 950}


@pytest.mark.parametrize("case", [WanAnimateCase(), LTX2Case()], ids=named)
def test_caches_of_blocks_are_refused_where_blocks_are_more_than_their_first_output(case):
    with pytest.raises(ValueError, match="not registered"):
        case.make_mhla().enable_cache(FirstBlockCacheConfig())


@pytest.mark.parametrize(
    "config",
    [
        FirstBlockCacheConfig(threshold=1.0),
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, current_timestep_callback=lambda: CLOCK["timestep"]
        ),
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 901),
            attention_weight_callback=lambda _: 0.5,
            is_guidance_distilled=True,
            current_timestep_callback=lambda: CLOCK["timestep"],
        ),
    ],
    ids=lambda config: type(config).__name__,
)
@pytest.mark.parametrize("case", [WanCase(), WanVACECase(), SkyReelsCase(), LTXCase(), LTX23Case(), *JOINT], ids=named)
def test_caches(case, config):
    if case.attention == "attn" and isinstance(config, FasterCacheConfig):
        pytest.skip("diffusers splits what attention returns, and here that is a pair, in the stock model too")
    if isinstance(case, WanVACECase) and isinstance(config, FirstBlockCacheConfig):
        pytest.skip("diffusers caches what control blocks add, and adds it again, in the stock model too")
    if isinstance(case, LTX23Case) and isinstance(config, FirstBlockCacheConfig):
        pytest.skip("refused, see above")
    for model in (case.make(case.upstream), case.make_mhla()):
        inputs = case.inputs()
        changed = {**inputs, "hidden_states": inputs["hidden_states"] * 1.1}
        plain = case.run(model)
        with torch.no_grad():
            expected = case.predict(model, **changed)
            model.enable_cache(config)
            with model.cache_context("one"):
                # Caches are filled before the range of timesteps in which they are used.
                for CLOCK["timestep"] in (950, 940, 930):
                    torch.testing.assert_close(case.predict(model, **inputs), plain)
                CLOCK["timestep"] = 500
                outputs = [case.predict(model, **changed) for _ in range(2)]
            model.disable_cache()
        assert all(output.isfinite().all() for output in outputs)
        assert max(relative_error(output, expected) for output in outputs) > 1e-6
        torch.testing.assert_close(case.run(model), plain)


# Offloading and ways of loading


@pytest.mark.parametrize("case", [*CASES, HunyuanVideoCase()], ids=named)
def test_offloading_to_memory_and_disk(case, tmp_path):
    model = case.make_mhla(**OPTION_SETS["everything"])
    expected = case.run(model)
    size = compute_module_sizes(model)[""]
    split = set()
    for safe, share in ((True, 0.6), (True, 0.9), (False, 0.6)):
        folder, arguments = (
            tmp_path / f"{safe}{share}",
            {"device_map": "auto", "max_memory": {"cpu": int(share * size)}, "use_safetensors": safe},
        )
        model.save_pretrained(folder, safe_serialization=safe)
        with pytest.raises(ValueError, match="offload_folder"):
            case.mhla_class.from_pretrained(folder, **arguments)
        loaded = case.mhla_class.from_pretrained(folder, **arguments, offload_folder=folder / "offloaded")
        split.add(frozenset(map(str, loaded.hf_device_map.values())))
        torch.testing.assert_close(case.run(loaded), expected)
    assert frozenset({"cpu", "disk"}) in split
    offloaded = copy.deepcopy(model)
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    torch.testing.assert_close(case.run(offloaded), expected)
    disk_offload(model, tmp_path / "disk", execution_device=torch.device("cpu"))
    torch.testing.assert_close(case.run(model), expected)
