# SPDX-License-Identifier: Apache-2.0
"""What the shared checks need to know of a model, and small helpers for them."""

import contextlib
import copy
import logging
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from mhla_hf import BlockLayout, MHLAConfig, convert
from mhla_hf.families.inputs import example_inputs
from mhla_hf.layers.mixing import with_window_size
from mhla_hf.models.sizes import packs_latents, patch_sizes
from mhla_hf.ops.forms import attend_naively
from mhla_hf.ops.operands import Operands


# Kinds of MHLA layer, as changes to a case's own options.
OPTION_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "authors": {"normalizer": "none", "feature_map_eps": 1e-6, "output_norm": True, "output_gate": True},
    "everything": {
        "feature_map": "hedgehog",
        "mixing_heads": "per_head",
        "mixing_constraint": "nonnegative",
        "output_norm": True,
        "output_gate": True,
        "lepe_kernel": 3,
        "window": "adjacent",
    },
    "rope_first": {"feature_map": "elu", "rope": "before_feature_map"},
    "hybrid": {"layers": [1]},
}


class ModelCase:
    """One supported model at tiny size.

    Attributes:
        upstream: The diffusers class.
        config: Arguments of its constructor.
        sizes: Three sizes of latents, or token grids of models that take packed latents. The first two have the same
            number of tokens on different grids; the blocks do not divide the grid of the third.
        text_tokens: Tokens of the text.
        masks: Arguments that mask the text, by dtype. The second sample of a batch has two tokens of padding.
        mhla_class: Its MHLA class.
        options: MHLA options that fit the tiny model's inputs.
        block_list: Name of the model's list of layers.
        attention: Name of the self-attention of a layer.
        unused: Parts of the names of parameters that may have no gradient, or one of zero, as in the stock model.
        untrained: Ends of the names of MHLA parameters whose gradient is zero.
        upstream_size: A size of `inputs` that the diffusers class takes too.
        thorough: Whether all shared checks are fast tests, not only those marked `smoke`.
    """

    upstream: ClassVar[Any]
    config: ClassVar[dict[str, Any]]
    sizes: ClassVar[tuple[tuple[int, ...], ...]]
    text_tokens: ClassVar[int] = 7
    masks: ClassVar[dict[str, torch.dtype]] = {}
    mhla_class: ClassVar[Any]
    options: ClassVar[dict[str, Any]]
    block_list: ClassVar[str] = "blocks"
    attention: ClassVar[str] = "attn1"
    unused: ClassVar[tuple[str, ...]] = ()
    untrained: ClassVar[tuple[str, ...]] = ()
    upstream_size: ClassVar[Any] = 0
    thorough: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "mhla_class"):
            cls.upstream = cls.mhla_class._upstream_class()

    def make(self, cls: type | None = None, *, seed: int = 0, **overrides: Any) -> torch.nn.Module:
        """A tiny model of `cls` in evaluation mode; `overrides` go to its constructor."""
        torch.manual_seed(seed)
        return (cls or self.upstream)(**{**self.config, **overrides}).eval()

    def inputs(
        self,
        size: Any = 0,
        *,
        batch: int = 1,
        text_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
    ) -> dict[str, Any]:
        """Arguments of `forward` at one of the sizes, by its number, or at another."""
        size = self.sizes[size] if isinstance(size, int) else size
        model = meta_model(type(self))
        if not packs_latents(self.upstream):
            size = [side // patch for side, patch in zip(size, patch_sizes(self.upstream, model.config, "the case"))]
        text, cpu = text_tokens or self.text_tokens, torch.device("cpu")
        inputs = example_inputs(model, size, dtype, cpu, text=text, batch=batch, seed=seed)
        for name, kind in self.masks.items():
            inputs[name] = text_mask(batch, inputs["encoder_hidden_states"].shape[1]).to(kind)
        return inputs

    def make_mhla(self, *, trained: bool = True, **options: Any) -> torch.nn.Module:
        """A tiny MHLA model; `trained` moves the MHLA parameters off their initial values."""
        model = self.make(self.mhla_class, mhla=self._own_options(options))
        return perturb_mhla(model) if trained else model

    def _own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        # A window of the default size sees the whole of these grids, and MHLA would have no share in the output.
        small = {"window_size": (1,) * len(self.mhla_class.default_grid)} if options.get("window") else {}
        return {**self.options, **small, **options}

    def full_options(self, **options: Any) -> MHLAConfig:
        """All options of `make_mhla(**options)`: the class's defaults, the case's, and these."""
        config = MHLAConfig(**{**self.mhla_class.default_options, **self._own_options(options)})
        return with_window_size(config, len(self.mhla_class.default_grid))

    def predict(self, model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
        """What a model predicts, one tensor."""
        return model(**inputs).sample

    def run(self, model: torch.nn.Module, size: int = 0, **options: Any) -> torch.Tensor:
        """The model's output without gradients."""
        with torch.no_grad():
            return self.predict(model, **self.inputs(size, **options))

    def convert_stock(self, options: dict[str, Any], sizes: Sequence[Any]) -> tuple[torch.nn.Module, list[float]]:
        """A converted model, and at each size the error of its output against that of the stock model."""
        stock = self.make()
        expected = [self.run(stock, size, batch=2) for size in sizes]
        model = convert(stock, options)
        outputs = (self.run(model, size, batch=2) for size in sizes)
        return model, [relative_error(output, stock_output) for output, stock_output in zip(outputs, expected)]

    def gradients_of(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """A copy of the gradient of every parameter, without the unused ones."""
        return {
            # Wrappers put their own part into the name.
            name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if (parameter.grad is not None and parameter.grad.any()) or not any(part in name for part in self.unused)
        }

    def silence(self, model: Any, layer: int) -> None:
        """Take away what comes out of the self-attention of a layer, of the MHLA model or of the softmax one."""
        self.mhla_class._self_attentions(model)[layer].to_out[0].weight.data.zero_()

    def assert_softmax_layers_stay(self, **options: Any) -> None:
        """Whichever layer is MHLA, the others compute as in the softmax model, bit for bit."""
        for layer in self.make_mhla().mhla_layers:
            stock = self.make()
            model = convert(copy.deepcopy(stock), {**self.options, "layers": [layer]})
            assert model.mhla_layers == [layer]
            # Another order of the keys rounds their sums in another way.
            model.block_order = False
            for each in (stock, model):
                self.silence(each, layer)
            for size in range(3):
                assert torch.equal(self.run(model, size, **options), self.run(stock, size, **options))

    def naive_gradient_error(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> float:
        """Error of the gradients in float64 against those of the dense definition."""
        model = self.make_mhla(**options).double()
        inputs = self.inputs(2, dtype=torch.float64)

        def gradients() -> dict[str, torch.Tensor]:
            model.zero_grad()
            self.predict(model, **inputs).square().mean().backward()
            return self.gradients_of(model)

        actual = gradients()
        monkeypatch.setattr("mhla_hf.layers.mhla.attend_on", naive_attention)
        return gradient_error(actual, gradients())


@cache
def meta_model(case: type[ModelCase]) -> Any:
    """The diffusers model of a case without weights."""
    with torch.device("meta"):
        return case().make()


def text_mask(batch: int, tokens: int) -> torch.Tensor:
    """`[B, X]`, zeros for padding: none in the first sample, two tokens in the others."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[1:, -2:] = 0
    return mask


def mhla_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that only the MHLA version of a model has."""
    return {name: parameter for name, parameter in model.named_parameters() if ".mhla." in name}


@torch.no_grad()
def perturb_mhla(model: torch.nn.Module, seed: int = 5) -> torch.nn.Module:
    """Moves every MHLA parameter a little, as training would: a loader that initialises them anew is then caught."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in mhla_parameters(model).values():
        noise = torch.rand(parameter.shape, generator=generator)
        parameter.add_(0.2 * parameter.abs().mean().clamp(min=0.05) * noise.to(parameter.dtype))
    return model


def assert_same_parameters(actual: torch.nn.Module, expected: torch.nn.Module, only_common: bool = False) -> None:
    """Fails unless the state dicts hold the same values; dtypes may differ."""
    actual, expected = actual.state_dict(), expected.state_dict()
    names = set(actual) & set(expected) if only_common else set(expected)
    assert only_common or set(actual) == set(expected)
    assert names
    for name in names:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, check_dtype=False, msg=name)


def assert_fresh(model: torch.nn.Module) -> None:
    """Fails unless every MHLA parameter has exactly its initial value, rounded to the parameter's dtype."""
    modules = model.mhla_modules()
    assert modules
    for module in modules.values():
        for name, parameter in module.named_parameters():
            assert parameter.device.type != "meta", name
            initial = module.initial_tensor(name).to(parameter.dtype)
            torch.testing.assert_close(parameter.detach().cpu(), initial, rtol=0, atol=0, msg=name)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def gradient_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of gradients by name, those left out that are rounding errors themselves: a bias of
    the keys changes nothing under softmax."""
    noise = 1e-6 * max(gradient.norm() for gradient in expected.values())
    return max(
        relative_error(actual[name], gradient) for name, gradient in expected.items() if gradient.norm() > noise
    )


@contextlib.contextmanager
def recorded_warnings():
    """Yields a list that collects every warning logged by diffusers or this package (diffusers' do not propagate)."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "mhla_hf")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def captured(module: torch.nn.Module):
    """Yields a list that collects the arguments, the keywords and the output of every call of `module`."""
    calls: list[SimpleNamespace] = []

    def record(_, arguments, keywords, output):
        calls.append(SimpleNamespace(arguments=arguments, keywords=keywords, output=output))

    handle = module.register_forward_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
    assert calls


def attention_inputs(call: SimpleNamespace) -> list[torch.Tensor]:
    """Query, key and value of a captured call of an `MHLA` module, queries and keys after the norms it was given."""
    query, key, value = call.arguments
    norms = call.keywords.get("norms")
    if norms is not None:
        query, key = norms.apply(query, key)
    return [query, key, value]


def naive_attention(
    backend: str, operands: Operands, mixing: torch.Tensor, layout: BlockLayout, *, causal: bool
) -> torch.Tensor:
    """`attend_on` by the dense definition, whatever the backend."""
    return attend_naively(operands, mixing, layout, causal)


def assert_tables_of_upstream(case, embedding):
    """The rotary tables of softmax layers, in the shape of the grid."""
    model, latents = case.make_mhla(), case.inputs(2)["hidden_states"]
    for ours, theirs in zip(model.rope(latents), embedding(12, (1, 2, 2), 64)(latents)):
        assert ours.shape == (1, 5, 3, 7, 1, 12)
        assert torch.equal(ours.flatten(1, 3), theirs)
