"""Losses on proxies: explicit loops, peers, faults, and what an optimiser is given."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pcl.labelled import as_posterior
from pcl.objectives import ByLabel
from pcl.objectives import parameter_groups as loop_groups
from pcl.proxies import (
    PROXY_LOSSES,
    JointProxies,
    ProxyAnchor,
    ProxyELK,
    ProxyLoss,
    ProxyNCA,
    SoftmaxProxies,
    parameter_groups,
    warm_start,
)
from pcl.vmf import VonMisesFisher

CLOSED = [name for name in PROXY_LOSSES if name != "el-nivmf"]  # draws no samples
SOFTMAX = [name for name in CLOSED if issubclass(PROXY_LOSSES[name], SoftmaxProxies)]
ROUND = [name for name in CLOSED if name not in ("nivmf", "fisher-bingham")]


def batch(
    n: int = 9, dim: int = 4, classes: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Vectors of different lengths, and labels with every class among them."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=generator, dtype=torch.float64) * 3
    return z, torch.arange(n) % classes


def make(name: str, classes: int = 3, dim: int = 4, seed: int = 1) -> ProxyLoss:
    """A loss whose proxies differ in every respect."""
    torch.manual_seed(seed)
    loss = PROXY_LOSSES[name](classes, dim).double()
    if hasattr(loss, "log_concentration"):
        with torch.no_grad():
            loss.log_concentration += torch.randn_like(loss.log_concentration) / 2
    return loss


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_loss_is_minus_the_log_of_the_posterior(name: str) -> None:
    (z, labels), loss = batch(), make(name)
    found = loss(z, labels)
    assert isinstance(loss, SoftmaxProxies)
    wanted = -loss.posterior(z)[torch.arange(9), labels].log().mean()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", CLOSED)
def test_vectors_and_posteriors_are_the_same_thing(name: str) -> None:
    (z, labels), loss = batch(), make(name)
    q = VonMisesFisher(normalize(z, dim=-1), z.norm(dim=-1))
    torch.testing.assert_close(loss(z, labels), loss(q, labels))


@pytest.mark.parametrize("name", ROUND)
def test_turning_images_and_proxies_together_changes_nothing(name: str) -> None:
    (z, labels), loss = batch(), make(name)
    before = loss(z, labels)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    with torch.no_grad():
        loss.directions.copy_(loss.directions @ turn.T)
    torch.testing.assert_close(loss(z @ turn.T, labels), before)


@pytest.mark.parametrize("name", CLOSED)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    (z, labels), loss = batch(), make(name)
    z.requires_grad_()
    parameters = [p for p in loss.parameters() if p.requires_grad]
    torch.autograd.gradcheck(lambda *_: loss(z, labels), (z, *parameters), atol=1e-6)


@pytest.mark.parametrize("name", list(PROXY_LOSSES))
@pytest.mark.parametrize("dim", [2, 128, 2048])
@pytest.mark.parametrize("length", [1e-6, 1.0, 1e4])
def test_everything_is_finite_in_single_precision(
    name: str, dim: int, length: float
) -> None:
    torch.manual_seed(0)
    loss = PROXY_LOSSES[name](5, dim)
    z = (normalize(torch.randn(8, dim), dim=-1) * length).requires_grad_()
    value = loss(z, torch.arange(8) % 5)
    value.backward()
    assert value.isfinite() and z.grad is not None and bool(z.grad.isfinite().all())
    for parameter in loss.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


def test_a_vector_of_length_zero_is_a_uniform_posterior() -> None:
    loss = make("elk", dim=5)
    z = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    assert isinstance(loss, SoftmaxProxies)
    torch.testing.assert_close(loss.posterior(z), torch.full((2, 3), 1 / 3).double())


def test_the_classic_form_leaves_its_class_out() -> None:
    z, labels = batch()
    torch.manual_seed(0)
    loss = ProxyNCA(3, 4, temperature=0.5, classic=True, reduction="none").double()
    cos = (normalize(z, dim=-1) @ loss.locs.T / loss.temperature).detach()
    wanted = [
        -math.log(math.exp(row[y]) / sum(math.exp(row[c]) for c in range(3) if c != y))
        for row, y in zip(cos.tolist(), labels.tolist(), strict=True)
    ]
    torch.testing.assert_close(
        loss(z, labels), torch.tensor(wanted, dtype=torch.float64)
    )


def test_cosine_losses_agree_with_pytorch_metric_learning() -> None:
    peers = pytest.importorskip("pytorch_metric_learning.losses")
    z, labels = (part.float() if part.is_floating_point() else part for part in batch())
    ours, theirs = (
        ProxyNCA(3, 4, temperature=0.05),
        peers.NormalizedSoftmaxLoss(3, 4, 0.05),
    )
    theirs.W.data = ours.directions.data.T.clone()
    torch.testing.assert_close(ours(z, labels), theirs(z, labels))
    anchor, peer = ProxyAnchor(3, 4), peers.ProxyAnchorLoss(3, 4, margin=0.1, alpha=32)
    peer.proxies.data = anchor.directions.data.clone()
    torch.testing.assert_close(anchor(z, labels), peer(z, labels))


def test_a_class_that_is_not_in_the_batch_gets_no_pull_and_a_finite_gradient() -> None:
    (z, _), loss = batch(), make("anchor", classes=6)
    loss(z, torch.arange(9) % 2).backward()
    assert loss.directions.grad is not None
    assert bool(loss.directions.grad.isfinite().all())


def test_all_that_learns_is_in_exactly_one_group() -> None:
    loss = JointProxies(ProxyELK(3, 4, learn_temperature=True), ProxyNCA(3, 4), 0.5)
    groups = parameter_groups(loss, 1e-3, proxy=100.0, concentration=7.0)
    rates = {group["name"].rpartition(".")[2]: group["lr"] for group in groups}
    assert rates == pytest.approx(
        {"directions": 0.1, "log_concentration": 7e-3, "log_temperature": 1e-3}
    )
    held = [p for group in groups for p in group["params"]]
    assert len({id(p) for p in held}) == len(held) == 3
    torch.optim.Adam(groups, 1e-3)  # refuses a parameter that occurs twice


def test_joint_losses_share_their_directions() -> None:
    z, labels = batch()
    first, second = make("elk"), make("nca", seed=2)
    loss = JointProxies(first, second, omega=0.3)
    assert first.directions is second.directions
    torch.testing.assert_close(
        loss(z, labels), first(z, labels) + 0.3 * second(z, labels)
    )


def test_the_loop_finds_the_proxies() -> None:
    from pcl.encoders import NormEncoder

    objective = ByLabel(NormEncoder(nn.Linear(6, 4)), ProxyELK(3, 4))
    assert len(loop_groups(objective)["loss"]) == 2
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert objective((x, torch.tensor([0, 1, 2, 0, 1]))).isfinite()


def test_a_warm_start_with_one_image_of_a_class_stays_finite() -> None:
    z, loss = torch.eye(4, dtype=torch.float64)[:3], make("elk")
    warm_start(loss, z, torch.arange(3))
    torch.testing.assert_close(loss.locs.detach(), z)
    assert bool(loss.log_concentration.isfinite().all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ProxyELK(3, 4)(torch.randn(2, 5), torch.tensor([0, 1])), "dimension 5"),
        (lambda: ProxyELK(3, 4)(torch.randn(2, 4), torch.tensor([0, 3])), "0..2"),
        (lambda: ProxyELK(3, 4)(torch.randn(2, 4), torch.tensor([-1, 0])), "0..2"),
        (lambda: ProxyELK(3, 4)(torch.randn(2, 4), torch.tensor([0.0, 1.0])), "long"),
        (lambda: ProxyELK(3, 4)(torch.randn(2, 4), torch.tensor([0])), "one for each"),
        (lambda: ProxyELK(0, 4), "n_classes"),
        (lambda: ProxyELK(3, 1), "dim"),
        (lambda: ProxyELK(3, 4, temperature=0.0), "temperature"),
        (lambda: ProxyELK(3, 4, kappa=-1.0), "kappa"),
        (lambda: ProxyELK(3, 4, reduction="max"), "reduction"),
        (lambda: ProxyAnchor(3, 4, alpha=0.0), "alpha"),
        (lambda: ProxyNCA(1, 4, classic=True), "second class"),
        (lambda: ProxyELK(3, 4).read(torch.full((2, 4), math.nan)), "NaN"),
        (lambda: JointProxies(ProxyELK(3, 4), ProxyNCA(2, 4)), "one shape"),
        (lambda: JointProxies(ProxyELK(3, 4), ProxyNCA(3, 4), math.nan), "omega"),
        (lambda: warm_start(ProxyELK(3, 4), torch.randn(2, 4), torch.tensor([0, 1])), "classes \\[2\\]"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("q", [torch.ones(3), torch.ones(2, 3).long(), [[1.0]], None])
def test_what_is_neither_posterior_nor_vectors_is_refused(q: object) -> None:
    with pytest.raises(TypeError, match="posteriors or a floating-point tensor"):
        ProxyELK(3, 3).read(q)


def test_autocast_keeps_the_digits() -> None:
    (z, labels), loss = batch(), make("elk").float()
    z = z.float()
    wanted = loss(z, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(loss(z, labels), wanted)


def test_stretched_densities_of_all_pairs_are_those_of_the_distribution() -> None:
    from pcl.nonisotropic import NonIsotropicVMF

    loss, x = make("nivmf"), normalize(batch()[0], dim=-1)
    with torch.no_grad():
        loss.log_concentration += torch.randn(3, 4).double()
        rho = NonIsotropicVMF(loss.locs, loss.log_concentration.exp())
        wanted = torch.stack([rho.log_prob(row) for row in x])
        torch.testing.assert_close(loss.similarity(as_posterior(x)), wanted)


@pytest.mark.parametrize(("dim", "kappa"), [(4, 6.0), (128, 20.0)])
def test_a_sampled_likelihood_tends_to_the_closed_one(dim: int, kappa: float) -> None:
    """Within three standard errors for every image and class; the draws are seeded."""
    torch.manual_seed(3)
    options = {"kappa": kappa, "n_samples": 20_000}
    sampled = PROXY_LOSSES["el-nivmf"](3, dim, **options).double()
    closed = ProxyELK(3, dim, kappa=kappa).double()
    with torch.no_grad():
        closed.directions.copy_(sampled.directions)
        q = as_posterior(batch(dim=dim)[0])
        gap = sampled.similarity(q) - closed.similarity(q)
        # log of a mean of 20,000: its standard error is the relative one of the density
        draws = q.sample((5000,)).flatten(0, 1)
        density = sampled.log_prob_pairs(draws).exp().unflatten(0, (5000, 9))
        se = density.std(0) / density.mean(0) / 20_000**0.5
    assert bool((gap.abs() < 3 * se).all()) and bool((se < 0.1).all())


def stretched(n_samples: int, dim: int, kind: type[ProxyLoss]) -> ProxyLoss:
    """Proxies with another width along every axis."""
    torch.manual_seed(11)
    loss = kind(3, dim, kappa=6.0, n_samples=n_samples).double()
    with torch.no_grad():
        loss.log_concentration += torch.randn(3, dim).double() / 2
    return loss


def test_a_stretched_sampled_likelihood_is_the_integral_over_the_circle() -> None:
    """Within three standard errors for every image and class; the draws are seeded."""
    loss = stretched(20_000, 2, PROXY_LOSSES["el-nivmf"])
    q = as_posterior(batch(dim=2)[0])
    angle = torch.arange(6000, dtype=torch.float64) * (2 * math.pi / 6000)
    ring = torch.stack([angle.cos(), angle.sin()], -1)
    with torch.no_grad():
        density = loss.log_prob_pairs(ring).exp()  # (6000, 3)
        weight = q.log_prob(ring[:, None]).exp() * (2 * math.pi / 6000)  # (6000, 9)
        wanted = weight.T @ density
        se = ((weight.T @ density.square()) / wanted.square() - 1).sqrt() / 20_000**0.5
        off = (loss.similarity(q) - wanted.log()) / se
    assert off.abs().max() < 3


def test_the_released_loss_tends_to_its_closed_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exact draws, a round likelihood and a bias; within three standard errors."""
    from pcl.bessel import log_normalizer
    from pcl.kernels import log_expected_likelihood
    from pcl.published import objectives

    def exact(loc: Tensor, kappa: Tensor, n: int) -> Tensor:
        return VonMisesFisher(loc, kappa).sample((n,))

    monkeypatch.setattr(objectives, "published_sample", exact)
    loss = stretched(20_000, 128, objectives.PublishedELNivMF)
    q = as_posterior(batch(dim=128)[0])
    with torch.no_grad():
        log_k = loss.log_concentration
        centre = log_k.exp() * loss.locs
        length = centre.norm(dim=-1)
        round_ = VonMisesFisher(centre / length[:, None], length)
        bias = objectives.parabola_log_normalizer(128, length) + log_k.sum(-1)
        bias = bias - length.log() - log_normalizer(128, length)
        wanted = log_expected_likelihood(q, round_, pairwise=True) + bias
        dens = (q.sample((5000,)) @ centre.T).exp()
        se = dens.std(0) / dens.mean(0) / 20_000**0.5
        off = (loss.logits(q) - wanted) / se
    assert off.abs().max() < 3 and bool((se < 0.1).all())


@pytest.mark.parametrize("name", ["nivmf", "el-nivmf", "fisher-bingham"])
def test_a_warm_start_sets_the_widths_of_stretched_classes(name: str) -> None:
    """As round as the data's fit: the density of `ProxyVMF` at the same start."""
    z, labels = batch(n=60, dim=5)
    loss, known = make(name, dim=5), make("vmf", dim=5)
    for each in (loss, known):
        warm_start(each, z, labels)
    with torch.no_grad():
        x = normalize(batch(dim=5, seed=3)[0], dim=-1)
        wanted = known.similarity(as_posterior(x))
        if name == "fisher-bingham":
            found = torch.stack([loss.proxies.log_prob(row) for row in x])
        else:
            found = loss.log_prob_pairs(x)
    torch.testing.assert_close(found, wanted)


def test_the_widths_of_a_class_learn_at_the_rate_of_concentrations() -> None:
    groups = parameter_groups(make("fisher-bingham"), 1e-3, concentration=7.0)
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates["quadratic"] == rates["log_concentration"] == pytest.approx(7e-3)


@pytest.mark.parametrize(
    ("dim", "bound"), [(5, 1e-7), (24, 1e-7), (40, 1e-2), (256, 1e-6)]
)
def test_fisher_bingham_proxies_agree_with_their_density(
    dim: int, bound: float
) -> None:
    from pcl.fisher_bingham import log_product_kernel

    torch.manual_seed(4)
    loss = PROXY_LOSSES["fisher-bingham"](3, dim).double()
    q = as_posterior(batch(dim=dim)[0])
    with torch.no_grad():
        loss.quadratic.copy_(-10 * torch.rand(3, dim))
        each = VonMisesFisher(q.loc[:, None], q.concentration[:, None])
        wanted = log_product_kernel(loss.proxies, each)
        gap = loss.similarity(q) - wanted
    assert (gap - gap.mean(1, keepdim=True)).abs().max() < bound


def test_the_released_loss_ignores_the_stretch_of_its_samples() -> None:
    """Scaling one axis of K by mu = 0 changes no cosine with K mu, only the bias."""
    from pcl.published.objectives import PublishedELNivMF

    torch.manual_seed(5)
    loss = PublishedELNivMF(2, 128, n_samples=3).double()
    with torch.no_grad():
        loss.directions[:, 0] = 0.0
        q = as_posterior(batch(dim=128)[0] / 3)
        torch.manual_seed(6)
        before = loss.logits(q)
        loss.log_concentration[:, 0] += 2.0
        torch.manual_seed(6)
        torch.testing.assert_close(
            loss.logits(q) - before, torch.full((9, 2), 2.0).double()
        )


def test_unknown_kernels_and_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="kernel must be"):
        PROXY_LOSSES["fisher-bingham"](3, 4, kernel="l2")
    with pytest.raises(ValueError, match="n_samples"):
        PROXY_LOSSES["el-nivmf"](3, 4, n_samples=0)
