# SPDX-License-Identifier: Apache-2.0
"""Wan under context parallelism: processes that hold a part of the tokens each compute what one does with all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers.hooks.context_parallel
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from peft import LoraConfig

from mhla_hf.config import MHLAConfig
from mhla_hf.families.wan import MHLAWanTransformer3DModel
from mhla_hf.layers import MHLA
from mhla_hf.ops.sharded import TokenShard
from mhla_hf.training.layers import mhla_layers, original_heads
from tests.tiny import wan_inputs, wan_pipeline, wan_transformer


EVEN = {"frames": 3, "height": 4, "width": 8}  # 24 tokens, 12 for each of two
ODD = {"frames": 3, "height": 6, "width": 10}  # 45 tokens, 23 and 22
ANY_RING = {"ring_degree": 2, "ring_anything": True}
ANY_ULYSSES = {"ulysses_degree": 2, "ulysses_anything": True}

# Options, sizes of the latents, how the sequence is split, and whether all attention in it has gradients there.
CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any], bool]] = {
    "full": ({"blocks": [3, 2, 2]}, EVEN, {"ring_degree": 2}, True),
    "hybrid": ({"blocks": [2, 2, 2], "layers": [0]}, EVEN, {"ulysses_degree": 2}, True),
    "odd": ({"blocks": [2, 2, 2]}, ODD, ANY_RING, True),
    # Ulysses of any length has no gradients in diffusers.
    "hybrid odd": ({"blocks": [2, 2, 2], "layers": [1]}, ODD, ANY_ULYSSES, False),
    "block query": ({"blocks": [1, 2, 2], "normalizer": "block_query"}, EVEN, {"ulysses_degree": 2}, True),
    "block query odd": ({"blocks": [3, 1, 5], "normalizer": "block_query"}, ODD, ANY_RING, True),
    "no normaliser": (
        {"blocks": [2, 2, 3], "normalizer": "none", "output_norm": True, "output_gate": True},
        ODD, ANY_ULYSSES, True,
    ),
    "hedgehog": (
        {"blocks": [2, 2, 2], "feature_map": "hedgehog", "rope": "before_feature_map", "mixing_heads": "per_head"},
        ODD, ANY_RING, True,
    ),
    "hedgehog rotated": (
        {"blocks": [2, 2, 2], "feature_map": "hedgehog", "mixing_heads": "per_head"}, EVEN, {"ring_degree": 2}, True,
    ),
    "rotated first": ({"blocks": [2, 2, 2], "rope": "before_feature_map"}, EVEN, {"ring_degree": 2}, True),
    "convolution": ({"blocks": [2, 2, 2], "lepe_kernel": 3, "feature_map": "elu"}, ODD, ANY_RING, True),
    "one block": ({"blocks": [1, 1, 1]}, ODD, ANY_ULYSSES, True),
    "adapter": ({"blocks": [2, 2, 2], "layers": [0]}, EVEN, {"ulysses_degree": 2}, True),
    "times of tokens": ({"blocks": [2, 2, 2]}, EVEN, {"ring_degree": 2}, True),
}  # fmt: skip


RUNS = [(case, torch.float32) for case in CASES]
RUNS += [(case, torch.float64) for case in ("hybrid", "odd", "hedgehog", "block query odd")]


def make_model(case: str, dtype: torch.dtype) -> Any:
    model = wan_transformer(MHLAWanTransformer3DModel, mhla=CASES[case][0])
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".mhla." in name:
            parameter.data += 0.1 * torch.rand_like(parameter)
    if case == "adapter":
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0"], init_lora_weights=False))
        # Only that of the adapter is trained otherwise.
        model.requires_grad_(True)
    return model.to(dtype)


def observe(case: str, model: Any, dtype: torch.dtype) -> dict[str, Any]:
    _, sizes, _, differentiable = CASES[case]
    inputs = wan_inputs(2, **sizes, dtype=dtype)
    if case == "times of tokens":
        inputs["timestep"] = torch.arange(48.0).reshape(2, 24) * 20
    inputs["hidden_states"].requires_grad_()
    with torch.set_grad_enabled(differentiable):
        (output,) = model(**inputs, return_dict=False)
    if not differentiable:
        return {"output": output}
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), "gradients": {**gradients, "latents": inputs["hidden_states"].grad}}


def gather_uneven(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """What diffusers does to gather pieces of several lengths, for Gloo, whose own gathering takes equal ones only."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([tensor.shape[dim]]), group=group)
    longest = int(max(sizes))
    rows = tensor.transpose(0, dim)
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    pieces = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes)]).transpose(0, dim)


def resolve_on_cpus(model: Any, config: Any) -> ParallelConfig:
    """What diffusers makes of a configuration, for processes on CPUs, of which it counts none."""
    context = getattr(config, "context_parallel_config", config)
    mesh = context.mesh or dist.init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    model._parallel_config = ParallelConfig(context_parallel_config=context)
    model._parallel_config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    return model._parallel_config


def make_video(config: Any = None) -> torch.Tensor:
    """Latents that a whole pipeline makes in two steps, split as `config` says."""
    pipeline = wan_pipeline(MHLAWanTransformer3DModel, mhla={"blocks": [2, 2, 2], "layers": [0]})
    if config is not None:
        pipeline.transformer.enable_parallelism(config=config)
    result = pipeline(
        "a", height=32, width=64, num_frames=9, num_inference_steps=2, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return result.frames


LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "grouped queries": ({"blocks": [2, 3]}, (5, 7), 1),
    "one axis": ({"block_size": [4], "grid": [23], "lepe_kernel": 7, "normalizer": "none"}, (23,), 2),
    "few tokens": ({"blocks": [2, 1, 1], "lepe_kernel": 5, "mixing_heads": "per_head"}, (3, 1, 1), 2),
    "block query": ({"blocks": [2, 2], "normalizer": "block_query", "feature_map": "hedgehog"}, (4, 6), 2),
    "identity": ({"blocks": [2, 2], "lepe_kernel": 3, "output_gate": True, "output_norm": True}, (5, 6), 2),
}


def observe_layer(case: str, group: Any = None) -> dict[str, torch.Tensor]:
    """A layer in float64: of all tokens, or of those of this process, with zeros in place of others' results."""
    options, grid, key_heads = LAYERS[case]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layer = MHLA(
        MHLAConfig(**options), hidden_size=16, num_heads=2, head_dim=6, value_head_dim=4, num_key_value_heads=key_heads
    ).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * random(*parameter.shape).abs()
    count = math.prod(grid)
    inputs = random(1, count, 2, 6), random(1, count, key_heads, 6), random(1, count, key_heads, 4)
    hidden, weights = random(1, count, 16), random(1, count, 2, 4)
    for tensor in inputs:
        tensor.requires_grad_()
    shard = None if group is None else TokenShard(group, count)
    own = slice(None) if shard is None else slice(*shard.run)
    output = layer(
        *[tensor[:, own] for tensor in inputs], grid=grid, shard=shard, hidden_states=hidden[:, own],
        identity=case == "identity",
    )  # fmt: skip
    (output * weights[:, own]).sum().backward()
    everything = torch.zeros_like(weights)
    everything[:, own] = output.detach()
    named = {**dict(zip("qkv", inputs)), **dict(layer.named_parameters())}
    return {"output": everything, **{name: x.grad for name, x in named.items() if x.grad is not None}}


def work(rank: int, path: Path, count: int, cases: list[tuple[str, torch.dtype]]) -> None:
    torch.set_num_threads(1)
    diffusers.hooks.context_parallel._all_gather_anything = gather_uneven
    MHLAWanTransformer3DModel._resolve_parallel_config = resolve_on_cpus
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=count)
    models, layers, others = {}, {}, {}
    for case, dtype in cases:
        model = make_model(case, dtype)
        split = {name: count if name.endswith("degree") else value for name, value in CASES[case][2].items()}
        model.enable_parallelism(config=ContextParallelConfig(**split))
        seen = observe(case, model, dtype)
        for gradient in seen.get("gradients", {}).values():
            dist.all_reduce(gradient)
        models[f"{case} {dtype}"] = seen
    for case in LAYERS:
        layers[case] = observe_layer(case, dist.group.WORLD)
        for tensor in layers[case].values():
            dist.all_reduce(tensor)
    even = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=count))
    # Under this plan, the sequence stays whole.
    model = make_model("full", torch.float32)
    model.enable_parallelism(config=even, cp_plan={"": MHLAWanTransformer3DModel._cp_plan[""]})
    try:
        model(**wan_inputs(**EVEN), return_dict=False)
    except ValueError as error:
        others["plan"] = str(error)
    others["video"] = make_video(ContextParallelConfig(ulysses_degree=count)) if count == 2 else None
    model = make_model("hybrid", torch.float32)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=count))
    model.train().enable_gradient_checkpointing()
    if count == 2:
        others["checkpointed"] = observe("hybrid", model, torch.float32)["gradients"]
        for gradient in others["checkpointed"].values():
            dist.all_reduce(gradient)
    try:
        with original_heads(mhla_layers(model)):
            model(**wan_inputs(**EVEN), return_dict=False)
    except ValueError as error:
        others["original"] = str(error)
    reduced, original = [], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append((tensor.dtype, tensor.nbytes))
        return original(tensor, *args, **kwargs)

    model = make_model("full", torch.float32).to(torch.bfloat16)
    model.enable_parallelism(config=ContextParallelConfig(ring_degree=count))
    dist.all_reduce = all_reduce
    with torch.no_grad():
        others["half"] = model.eval()(**wan_inputs(**EVEN, dtype=torch.bfloat16), return_dict=False)[0]
    model.train()(**wan_inputs(**EVEN, dtype=torch.bfloat16), return_dict=False)
    others["reduced"] = reduced
    if rank == 0:
        torch.save((models, layers, others), path / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(path: Path, count: int, cases: list[tuple[str, torch.dtype]]) -> tuple[dict, dict, dict]:
    torch.multiprocessing.spawn(work, (path, count, cases), nprocs=count)
    return torch.load(path / "results.pt", weights_only=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    return run(path, 2, RUNS)


def compare(found: dict[str, Any], case: str, dtype: torch.dtype) -> None:
    expected = observe(case, make_model(case, dtype), dtype)
    exact = dtype == torch.float64
    torch.testing.assert_close(found["output"], expected["output"], rtol=0, atol=1e-10 if exact else 1e-5)
    assert found.keys() == expected.keys()
    if "gradients" not in expected:
        return
    found, expected = found["gradients"], expected["gradients"]
    assert found.keys() == expected.keys()
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        # Wan's norms run in float32, whatever the type of the weights.
        limit = 1e-6 * gradient.norm() + 1e-12 if exact else 1e-5 * max(gradient.norm(), 0.01 * whole)
        assert (found[name] - gradient).norm() < limit, name


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_two_processes_compute_what_one_does(results, case, dtype):
    compare(results[0][f"{case} {dtype}"], case, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_exact(results, case):
    found, expected = results[1][case], observe_layer(case)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
def test_one_sum_of_block_summaries_travels_for_each_layer(results):
    # M · H · K · (V + 1) numbers in both layers, in half precision where nothing is trained.
    count = 12 * 2 * 12 * 13
    assert results[2]["reduced"] == [(torch.bfloat16, 2 * count)] * 2 + [(torch.float32, 4 * count)] * 2
    with torch.no_grad():
        exact = make_model("full", torch.float32)(**wan_inputs(**EVEN), return_dict=False)[0]
    assert (results[2]["half"] - exact).norm() < 0.01 * exact.norm()


@pytest.mark.slow
def test_three_processes_compute_what_one_does(tmp_path):
    cases = ["full", "odd", "block query odd", "convolution"]
    models, layers, _ = run(tmp_path, 3, [(case, torch.float32) for case in cases])
    for case in cases:
        compare(models[f"{case} torch.float32"], case, torch.float32)
    for case in LAYERS:
        for name, tensor in observe_layer(case).items():
            torch.testing.assert_close(layers[case][name], tensor, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
def test_pipelines_and_checkpointing(results):
    others = results[2]
    torch.testing.assert_close(others["video"], make_video(), rtol=1e-4, atol=1e-4)
    model = make_model("hybrid", torch.float32)
    expected = observe("hybrid", model, torch.float32)["gradients"]
    for name, gradient in expected.items():
        torch.testing.assert_close(others["checkpointed"][name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
def test_other_splits_are_refused(results):
    assert results[2]["plan"] == (
        "This process holds tokens 0 to 12 of 24, but query has 24. Split the sequence as the model's own plan for "
        "context parallelism does."
    )
    assert results[2]["original"] == "A model's original attention cannot be computed under context parallelism."
    model = make_model("full", torch.float32)
    for config in (TensorParallelConfig(tp_degree=2), ParallelConfig()):
        with pytest.raises(ValueError, match="supports context parallelism alone"):
            model.enable_parallelism(config=config)
    windowed = wan_transformer(MHLAWanTransformer3DModel, mhla={"blocks": [2, 2, 2], "window": "cross"})
    with pytest.raises(ValueError, match="does not reach over a softmax window"):
        windowed.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
    # What upstream says where no processes have been set up.
    with pytest.raises(RuntimeError, match="must be available and initialized"):
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
    assert model(**wan_inputs(), return_dict=False)[0].isfinite().all()
