# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: two processes that share the heads of a model compute what one computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mhla_hf.integrations.transformers.attaching import convert_transformers_model
from mhla_hf.utils.compat import UnsupportedVersionError
from mhla_hf.utils.compat.transformers import cache_of_output

from .mhla_models import default_options, inputs, mhla_model
from .tiny_models import FAMILIES, softmax_model


SIZES = {"num_hidden_layers": 2}
WINDOW = {"window": "block", "window_size": 5}
# Families and options beside those of `default_options`, which give every head mixing weights of its own.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": (
        "llama",
        {"output_gate": True, "output_norm": True, "window": "adjacent", "window_size": 3, "sink_tokens": 1},
    ),
    "norms": ("qwen3", {"feature_map": "relu", "mixing_heads": "shared", "output_norm": True, **WINDOW}),
    "new": ("llama", {}),
    "partial": ("qwen3", {"layers": [1]}),
    "image": ("vit", {"lepe_kernel": 3, "feature_map": "hedgehog"}),
}
PLANS: dict[str, Any] = {
    "image": {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
    }
}
LENGTH = 21


# Older versions of transformers split models in another way, which MHLA refuses.
SPLITS_MHLA = hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans")


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def load(case: str, path: Path, **options: Any) -> Any:
    model_class = transformers.AutoModel if case == "image" else transformers.AutoModelForCausalLM
    if case == "new":
        options["mhla"] = default_options("llama")
    return model_class.from_pretrained(path / case, **options)


def observe(family: str, model: Any) -> dict[str, Any]:
    """What a model computes, whole on every process."""
    given = inputs(family, length=LENGTH)
    model.train()
    output = model(**given)[0]
    output.square().mean().backward()
    seen = {
        "output": gathered(output.detach()),
        "gradients": {name: gathered(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        "state": {name: gathered(tensor.detach()) for name, tensor in model.state_dict().items()},
    }
    if family != "vit":
        generated = model.eval().generate(**given, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        seen["generated"] = generated.sequences
        seen["cache"] = [tuple(layer.keys.shape) for layer in cache_of_output(generated).layers]
    return seen


def work(rank: int, path: Path) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    results = {}
    halves = {"distributed_config": DistributedConfig(tp_size=2)}
    for case in CASES:
        # The older way to ask for the same.
        options = {"tp_plan": "auto"} if case == "partial" else halves
        if case in PLANS:
            options = {"distributed_config": DistributedConfig(tp_size=2, tp_plan=PLANS[case])}
        model = load(case, path, **options)
        results[case] = observe(CASES[case][0], model)
        results[case]["local"] = {
            name: tuple(parameter.to_local().shape if hasattr(parameter, "to_local") else parameter.shape)
            for name, parameter in model.named_parameters()
            if ".mhla." in name
        }
        model.save_pretrained(path / f"{case}-saved")
    try:
        load("few", path, **halves)
    except ValueError as error:
        results["few"] = str(error)
    try:
        model = load("softmax", path, **halves)
        convert_transformers_model(model, default_options("llama"))
    except ValueError as error:
        results["converted"] = str(error)
    if rank == 0:
        torch.save(results, path / "results.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["output"], expected["output"], rtol=1e-5, atol=2e-5)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    for name, tensor in expected["state"].items():
        assert torch.equal(found["state"][name], tensor), name


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if not SPLITS_MHLA:
        pytest.skip("this version of transformers does not split MHLA layers")
    path = tmp_path_factory.mktemp("parallel")
    torch.manual_seed(0)
    for case, (family, options) in CASES.items():
        if case == "new":
            softmax_model(family, **SIZES).save_pretrained(path / case)
        else:
            mhla_model(family, sizes=SIZES, **options).save_pretrained(path / case)
    softmax_model("llama", **SIZES).save_pretrained(path / "softmax")
    mhla_model("llama", sizes={**SIZES, "num_key_value_heads": 1}).save_pretrained(path / "few")
    torch.multiprocessing.spawn(work, (path,), nprocs=2)
    return path, torch.load(path / "results.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_compute_what_one_does(results, case):
    path, seen = results
    expected, found = observe(CASES[case][0], load(case, path)), seen[case]
    compare(found, expected)
    if case != "image":
        assert torch.equal(found["generated"], expected["generated"])
        # Each process keeps the state of its own key/value heads.
        assert found["cache"] == [(2, 1, LENGTH + 5, 8)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_saved_checkpoint_is_whole(results, case):
    path, _ = results
    again = load(case, path).state_dict()
    saved = type(load(case, path)).from_pretrained(path / f"{case}-saved").state_dict()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in again)


@pytest.mark.slow
def test_every_process_holds_its_own_heads(results):
    _, seen = results
    part = {name.partition(".mhla.")[2]: shape for name, shape in seen["grouped"]["local"].items() if ".0." in name}
    assert part == {
        "mixing": (2, 6),
        "mixing_decay": (2,),
        "feature_map_query.weight": (2, 8, 8),
        "feature_map_key.weight": (1, 8, 8),
        "output_norm.weight": (8,),
        "gate.weight": (16, 32),
        "gate.bias": (16,),
        "window_bias": (2,),
        "window_query": (2, 8),
    }
    assert seen["partial"]["local"].keys() == {
        f"model.layers.1.self_attn.mhla.{name}"
        for name in ("mixing", "mixing_decay", "feature_map_query.weight", "feature_map_key.weight")
    }
    assert seen["norms"]["local"]["model.layers.1.self_attn.mhla.mixing"] == (6,)
    assert seen["norms"]["local"]["model.layers.1.self_attn.mhla.window_bias"] == (2,)
    assert seen["image"]["local"]["layers.0.attention.mhla.lepe.weight"] == (16, 1, 3, 3)


@pytest.mark.slow
def test_heads_that_cannot_be_split_are_refused_before_loading(results):
    _, seen = results
    assert seen["few"] == (
        "layers.0.self_attn.mhla.feature_map_key.weight cannot be split over 2 processes: the layer has 4 query "
        "and 1 key/value heads. Choose a tp_size that divides both."
    )


@pytest.mark.slow
def test_a_split_model_is_not_converted_in_place(results):
    _, seen = results
    assert "Convert the checkpoint first (mhla-hf convert)" in seen["converted"]


@pytest.mark.skipif(SPLITS_MHLA, reason="this version of transformers splits MHLA layers")
def test_versions_that_cannot_split_refuse_before_loading():
    from transformers.distributed.configuration_utils import DistributedConfig

    config = FAMILIES["llama"].config()
    config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(UnsupportedVersionError, match="distributed.parallel_utils"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="mhla")
