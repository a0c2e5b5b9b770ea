"""Encoders: posteriors from any network, and a fair start for kappa."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pcl.encoders import (
    Cap,
    NormEncoder,
    SphereEncoder,
    encode,
    mlp_encoder,
    set_kappa_range,
    soft_cap,
    soft_exp,
)
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


@pytest.mark.parametrize("cap, most", [("hard", 1.0001e6), ("soft", 2.0001e6)])
def test_a_runaway_kappa_stays_finite(cap: Cap, most: float) -> None:
    head = nn.Linear(2, 1)
    nn.init.constant_(head.bias, 1e4)
    q = SphereEncoder(nn.Linear(2, 3), head, cap=cap)(torch.randn(4, 2))
    assert q.concentration.max() <= most


@pytest.mark.parametrize("bias", [-1e4, -50.0, 50.0, 1e4])
def test_a_saturated_kappa_finds_its_way_back(bias: float) -> None:
    """A clamp has no gradient where it clamps, nor has 1 + e^s where that is 1; a soft
    cap has one everywhere, in the right direction."""
    for cap, way_back in (("soft", True), ("hard", False)):
        head = nn.Linear(2, 1)
        nn.init.constant_(head.bias, bias)
        encoder = SphereEncoder(nn.Linear(2, 3), head, cap=cap)
        kappa = encoder(torch.ones(4, 2)).concentration
        ((kappa.log() - 3) ** 2).sum().backward()
        assert head.bias.grad is not None
        found = head.bias.grad.item() * (bias > 0 or -1)
        assert found > 0 if way_back else abs(found) < 1e-20, (cap, found)


@pytest.mark.parametrize("length", [1e7, 1e12, 1e18])
def test_a_length_past_the_cap_finds_its_way_back(length: float) -> None:
    for cap, slope in (("soft", True), ("hard", False)):
        out = torch.tensor([[length, 0.0]], requires_grad=True)
        kappa = NormEncoder(nn.Identity(), cap=cap)(out).concentration
        assert kappa.item() < 2.0001e6
        kappa.log().sum().backward()
        assert out.grad is not None
        assert (out.grad[0, 0].item() > 0) is slope


def test_the_soft_cap_is_smooth_and_the_identity_below() -> None:
    s = torch.linspace(-6, 20, 2601, dtype=torch.float64, requires_grad=True)
    kappa = soft_exp(s, math.log(1e6))
    (slope,) = torch.autograd.grad(kappa.sum(), s)
    by_hand = (kappa[2:] - kappa[:-2]) / (s[2:] - s[:-2])
    torch.testing.assert_close(slope[1:-1], by_hand, rtol=2e-2, atol=1e-6)
    between = (s >= -3) & (s <= math.log(1e6))
    assert torch.equal(kappa[between], s[between].exp())
    assert (kappa.diff() > 0).all()
    torch.testing.assert_close(
        soft_cap(s.exp(), 1e6)[s > -3], kappa[s > -3], rtol=1e-12, atol=0
    )
    assert torch.equal(soft_cap(s, math.inf), s)


@pytest.mark.parametrize("low, high", [(1.001, 1.01), (1.02, 5.0), (16.0, 32.0)])
def test_a_range_near_one_is_set_too(low: float, high: float) -> None:
    torch.manual_seed(0)
    encoder, x = mlp_encoder(3, 2, [8]), torch.randn(50, 3)
    set_kappa_range(encoder, x, low, high)
    with torch.no_grad():
        kappa = encoder(x).concentration
    found = torch.stack([kappa.min(), kappa.max()])
    torch.testing.assert_close(found, torch.tensor([low, high]), rtol=1e-4, atol=0)


def test_an_unknown_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="'soft' or 'hard'"):
        mlp_encoder(3, 2, [4], cap="firm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'soft' or 'hard'"):
        NormEncoder(nn.Identity(), cap="none")  # type: ignore[arg-type]


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
