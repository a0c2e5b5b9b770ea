"""Odd inputs to what newcomers call: an answer that names the argument, never a number
that means nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pcl.conformal import adaptive_scores
from pcl.encoders import NormEncoder
from pcl.fisher_bingham import (
    FisherBingham,
    fit_fisher_bingham,
    log_anisotropic_pair,
    log_fisher_bingham,
    log_product_kernel,
)
from pcl.grouping import clusters, mutual_information, spectrum_divergence
from pcl.heads import UncertaintyHead
from pcl.labelled import FromLabels, TwoViews
from pcl.losses import ExactInfoNCE
from pcl.mixtures import MixtureOfVMF
from pcl.proxies import PROXY_LOSSES
from pcl.sharing import save_pretrained
from pcl.vmf import VonMisesFisher
from pcl.watch import KappaWarning, complaints, look


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = drawn(8, 4), torch.arange(8) // 2
LOSS, VIEWS = FromLabels(ExactInfoNCE(20.0)), TwoViews(ExactInfoNCE(20.0))
ONE = VonMisesFisher(torch.eye(5)[0], 1.0)
B, A = drawn(4), drawn(4, seed=1)
MIXTURE = MixtureOfVMF(normalize(drawn(3, 4), dim=-1), 5.0, weights=torch.ones(3))
HEAD = UncertaintyHead(n_features=5, dim=3, hidden=8)
ENCODER = NormEncoder(nn.Linear(5, 3))
POINTS = np.ones((6, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LOSS(X * math.nan, Y), "embeddings have NaN"),
        (lambda: LOSS(X * math.inf, Y), "embeddings have NaN or infinite"),
        (lambda: LOSS(X[:0], Y[:0]), "embeddings are empty"),
        (lambda: LOSS(X, Y.numpy()[:5]), r"shape \(8,\).*got \(5,\)"),
        (lambda: VIEWS(X, X * math.nan), "embeddings have NaN"),
        (lambda: VIEWS(X, drawn(8, 5)), "4 dimensions and second 5"),
        (lambda: FromLabels(nn.MSELoss()), "q_pos.*MSELoss"),
        (lambda: FromLabels(ExactInfoNCE), "q_pos.*ExactInfoNCE"),
        (lambda: TwoViews(LOSS), "q_pos.*FromLabels"),
        (lambda: log_fisher_bingham(B, A, nodes=1), "nodes must be at least 4"),
        (lambda: log_fisher_bingham(B.double() * 1e160, A), "linear.*below 1e"),
        (lambda: FisherBingham(drawn(2, 4), drawn(3, 4)), "do not broadcast"),
        (lambda: log_product_kernel(FisherBingham(B, A), ONE), "same dimension"),
        (lambda: fit_fisher_bingham(torch.eye(3)[:1]), "one direction"),
        (lambda: fit_fisher_bingham(torch.eye(3), steps=0), "steps must be"),
        (lambda: log_anisotropic_pair(B, B, -torch.ones(4)), "lambda_ must be positive"),
        (lambda: log_anisotropic_pair(B, B, torch.zeros(4)), "lambda_ must be positive"),
        (lambda: log_anisotropic_pair(B / 0, B, torch.ones(4)), "h1 and h2 finite"),
        (lambda: MIXTURE.entropy(n_samples=0), "n_samples must be at least 1"),
        (lambda: MIXTURE.credible_log_prob(0.5, n_samples=0), "n_samples must be"),
        (lambda: MIXTURE.modes(merge=-1.0), "merge at least 0"),
        (lambda: MIXTURE.modes(n_steps=0), "n_steps must be at least 1"),
        (lambda: mutual_information(np.arange(2), np.arange(1)), r"got \(2,\) and \(1"),
        (lambda: mutual_information(np.array([]), np.array([])), "one group for each"),
        (lambda: clusters(POINTS, 7), "between 1 and the 6 points"),
        (lambda: clusters(POINTS, 2, starts=0), "starts be at least 1"),
        (lambda: HEAD(np.ones((2, 5))), "head.arrays"),
        (lambda: HEAD(torch.tensor(1.0)), "5 features in its last axis"),
        (lambda: save_pretrained(ENCODER, "nowhere"), "must be an UncertaintyHead or a LossHead"),
        (lambda: look(ENCODER, drawn(0, 5)), "these not none"),
        (lambda: look(ENCODER, drawn(50, 5), torch.arange(3)), "got 3 and 50"),
    ],
)  # fmt: skip
def test_the_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_labels_may_be_an_array_or_a_list() -> None:
    wanted = LOSS(X, Y)
    assert torch.equal(LOSS(X, Y.numpy()), wanted)
    assert torch.equal(LOSS(X, Y.tolist()), wanted)
    scores = adaptive_scores(X.softmax(-1))
    assert torch.equal(adaptive_scores(X.softmax(-1).numpy()), scores)


def test_a_compiled_loss_is_a_loss() -> None:
    compiled = torch.compile(ExactInfoNCE(20.0), backend="eager")
    assert FromLabels(compiled).loss is compiled


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_proxies_refuse_negative_concentrations_and_empty_batches(name: str) -> None:
    loss = PROXY_LOSSES[name](4, 4)
    loc = normalize(X, dim=-1)
    for kappa in (-1.0, math.nan):
        q = VonMisesFisher(loc, torch.full((8,), kappa), validate_args=False)
        with pytest.raises(ValueError, match="below 0, or NaN"):
            loss(q, Y)
    with pytest.raises(ValueError, match="empty"):
        loss(X[:0], Y[:0])
    with pytest.raises(ValueError, match="NaN or infinite"):
        loss(X * math.nan, Y)


def test_directions_that_are_not_there_make_the_spectrum_infinitely_uneven() -> None:
    assert spectrum_divergence(drawn(1, 4)) == math.inf
    assert spectrum_divergence(drawn(3, 4)) == math.inf
    assert spectrum_divergence(torch.ones(9, 4)) == math.inf
    assert 0 <= spectrum_divergence(drawn(9, 4)) < 1


def test_a_fit_that_did_not_get_there_says_so() -> None:
    law = FisherBingham(20 * torch.eye(6)[0], -torch.linspace(0, 200, 6))
    x = law.sample((500,), generator=torch.Generator().manual_seed(3))
    with pytest.raises(RuntimeError, match="no maximum was found in 1 steps"):
        fit_fisher_bingham(x, steps=1)
    assert fit_fisher_bingham(x).quadratic[-1] < -100


def test_a_kappa_that_is_not_a_number_is_called_so() -> None:
    q = VonMisesFisher(
        normalize(X, dim=-1), torch.tensor([math.nan] + [2.0] * 7), validate_args=False
    )
    assert complaints(q) == {"nan": "kappa is not a number for 1 of 8 inputs"}
    with pytest.warns(KappaWarning, match="not a number for 50 of 50"):
        look(ENCODER, torch.full((50, 5), math.nan))


def test_the_classifier_takes_any_seed_and_no_overflow() -> None:
    scikit = pytest.importorskip("sklearn.base")
    from pcl.scikit import UncertaintyClassifier

    x, y = drawn(40, 5).numpy(), np.arange(40) % 2
    small = {"dim": 3, "steps": 3, "batch_size": 16, "hidden": 8}
    for seed in (None, np.random.RandomState(0), np.int64(3)):
        made = UncertaintyClassifier(**small, random_state=seed).fit(x, y)
        assert made.predict(x).shape == (40,)
    again = scikit.clone(made).fit(x, y)
    np.testing.assert_array_equal(again.predict_proba(x), made.predict_proba(x))
    with pytest.raises(ValueError, match="too large"):
        made.predict_proba(x.astype(np.float64) * 1e300)
