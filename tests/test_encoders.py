"""Encoders: posteriors from any network, and a fair start for kappa."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pcl.encoders import SphereEncoder, encode, mlp_encoder, set_kappa_range
from pcl.networks import mlp


@pytest.mark.parametrize("shared", [False, True])
def test_posteriors_are_valid_and_differentiable(shared: bool) -> None:
    encoder = mlp_encoder(6, 4, [16, 16], shared)
    q = encoder(torch.randn(3, 5, 6))
    assert q.batch_shape == (3, 5)
    (q.loc[..., 0].sum() + q.concentration.sum()).backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters()
    )


@pytest.mark.parametrize("shared", [False, True])
def test_shared_means_shared(shared: bool) -> None:
    encoder = mlp_encoder(6, 4, [16, 16], shared)
    encoder(torch.randn(5, 6)).concentration.sum().backward()
    body = encoder.backbone if shared else encoder.mu_net
    assert (
        any(p.grad is not None and p.grad.abs().sum() > 0 for p in body.parameters())
        == shared
    )


@pytest.mark.parametrize("shared", [False, True])
def test_range_is_set_exactly_and_the_order_kept(shared: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(1000, 6)
    encoder = mlp_encoder(6, 4, [16, 16], shared)
    before = encoder(x).concentration
    set_kappa_range(encoder, x, 64.0, 128.0)
    after = encoder(x).concentration
    assert after.min().item() == pytest.approx(
        64, rel=1e-4
    ) and after.max().item() == pytest.approx(128, rel=1e-4)
    settled = before.argsort()
    assert (after[settled].diff() > -1e-3).all()


def test_a_runaway_kappa_stays_finite() -> None:
    head = nn.Linear(2, 1)
    nn.init.constant_(head.bias, 1e4)
    q = SphereEncoder(nn.Linear(2, 3), head)(torch.randn(4, 2))
    assert q.concentration.max() <= 1.0001e6


@pytest.mark.parametrize(
    "low, high",
    [(1.0, 2.0), (5.0, 5.0), (5.0, 4.0), (2.0, float("inf")), (float("nan"), 3.0)],
)
def test_an_impossible_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low and high"):
        set_kappa_range(mlp_encoder(3, 2, [4]), torch.randn(10, 3), low, high)


def test_impossible_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="widths"):
        mlp([3])


def test_half_precision_networks_give_single_precision_posteriors() -> None:
    encoder, x = mlp_encoder(6, 4, [16, 16]), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = encoder(x)
    assert q.loc.dtype == q.concentration.dtype == torch.float32
    torch.testing.assert_close(q.loc, encoder(x).loc, rtol=0, atol=0.05)


@pytest.mark.parametrize("shared", [False, True])
def test_an_encoder_says_each_parameter_once(shared: bool) -> None:
    encoder = mlp_encoder(6, 4, [16, 16], shared)
    groups = encoder.groups()
    assert list(groups) == ["mu", "kappa"]
    said = [id(p) for group in groups.values() for p in group]
    assert sorted(said) == sorted(id(p) for p in encoder.parameters())
    kappa = [id(p) for p in encoder.kappa_net.parameters()]
    assert [id(p) for p in groups["kappa"]] == kappa


def test_many_observations_are_encoded_in_parts() -> None:
    encoder, x = mlp_encoder(6, 4, [16, 16]), torch.randn(25, 6)
    q = encode(encoder, x, batch_size=10)
    assert q.batch_shape == (25,) and not q.loc.requires_grad
    torch.testing.assert_close(q.loc, encoder(x).loc)
    torch.testing.assert_close(q.concentration, encoder(x).concentration)
