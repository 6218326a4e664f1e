# SPDX-License-Identifier: Apache-2.0
"""The optimizer of matching: orthogonal updates of matrices, whole or by head, Adam, and multiplicative steps."""

import pytest
import torch

from mhla_hf.config import MHLAConfig
from mhla_hf.layers.mixing import effective_mixing, mixing_parameter_value
from mhla_hf.training.optimizers import ADAM, LOGARITHM, Muon, orthogonalize


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_orthogonalize_evens_out_singular_values(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices, steps=8))
    assert values.min() > 0.6 and values.max() < 1.3


def minimise(optimizer, loss, steps=300):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return loss().item()


@pytest.mark.parametrize("group", [{}, {"heads": 2}, {"heads": 2, "by_columns": True}])
def test_muon_learns_a_linear_map(group):
    torch.manual_seed(0)
    target, weight = torch.randn(8, 8), torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([{"params": [weight], **group}], lr=0.05)
    assert minimise(optimizer, lambda: (weight - target).square().mean()) < 0.05


def test_heads_are_orthogonalized_by_themselves():
    torch.manual_seed(0)
    gradient = torch.randn(8, 6)
    whole, rows, columns = (torch.nn.Parameter(torch.zeros(8, 6)) for _ in range(3))
    for weight, group in ((whole, {}), (rows, {"heads": 2}), (columns, {"heads": 2, "by_columns": True})):
        weight.grad = gradient.clone()
        Muon([{"params": [weight], **group}], lr=1.0, weight_decay=0.0).step()
    scale = 0.2 * 6**0.5
    expected = [scale * orthogonalize(part) for part in gradient.split(4)]
    torch.testing.assert_close(rows, -torch.cat(expected), rtol=1e-4, atol=1e-4)
    expected = [0.2 * 8**0.5 * orthogonalize(part) for part in gradient.split(3, dim=1)]
    torch.testing.assert_close(columns, -torch.cat(expected, 1), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole, rows)


def test_adam_is_torchs():
    torch.manual_seed(0)
    target, start = torch.randn(5), torch.randn(5)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    minimise(Muon([{"params": [ours], "kind": ADAM}], **options), lambda: (ours - target).pow(4).sum(), 20)
    minimise(torch.optim.AdamW([theirs], eps=1e-10, **options), lambda: (theirs - target).pow(4).sum(), 20)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("constraint", ["none", "nonnegative"])
def test_mixing_weights_stay_positive_and_leave_zero(constraint):
    config = MHLAConfig(mixing_constraint=constraint)
    start = torch.tensor([[0.9, 0.1], [0.5, 0.0]])
    target = torch.tensor([[0.2, 0.8], [0.99, 0.01]])
    mixing = torch.nn.Parameter(mixing_parameter_value(config, start))
    optimizer = Muon([{"params": [mixing], "kind": LOGARITHM, "config": config}], lr=0.05)
    smallest = []

    def loss():
        weights = effective_mixing(config, mixing)
        smallest.append(weights.min().item())
        return (weights - target).square().sum()

    assert minimise(optimizer, loss) < 1e-4
    assert min(smallest[1:]) > 0


def test_weights_that_are_not_used_stay():
    mixing = torch.nn.Parameter(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    optimizer = Muon([{"params": [mixing], "kind": LOGARITHM, "config": MHLAConfig()}], lr=0.05)
    minimise(optimizer, lambda: mixing.tril().square().sum(), 3)
    assert mixing[0, 1] == 0 and mixing[0, 0] < 1


def test_only_matrices():
    with pytest.raises(ValueError, match=r"parameters must be matrices; got one of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
