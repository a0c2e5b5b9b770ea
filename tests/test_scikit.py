"""The head as an estimator of scikit-learn: its own checks, and ours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install -e '.[heads]'")
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from pcl.marginal import log_marginal
from pcl.scikit import UncertaintyClassifier, class_probabilities
from pcl.vmf import VonMisesFisher

SMALL = {"dim": 3, "hidden": 32, "steps": 150, "batch_size": 32}
# Checks of scikit-learn that do not apply, each with its reason.
LEFT_OUT: dict[str, str] = {}


def left_out(estimator: Any) -> dict[str, str]:
    return LEFT_OUT


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [UncertaintyClassifier(**SMALL)], expected_failed_checks=left_out
)
def test_it_passes_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    if check.func.__name__ != "check_classifiers_train":  # the one that asks for skill
        estimator = clone(estimator).set_params(steps=10)
    check(estimator)


def blobs(n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Three classes with names, each a noisy point."""
    numbers = np.arange(n) % 3
    noise = np.random.default_rng(0).normal(size=(n, 5))
    return 4 * np.eye(3, 5)[numbers] + noise, np.array(["a", "b", "c"])[numbers]


def test_arrays_in_and_arrays_out() -> None:
    x, y = blobs()
    model = UncertaintyClassifier(**SMALL).fit(x, y)
    vectors, kappa = model.transform(x), model.certainty(x)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), kappa, rtol=1e-5)
    proba = model.predict_proba(x)
    assert proba.shape == (120, 3) and set(model.predict(x)) <= {"a", "b", "c"}
    assert model.score(x, y) > 0.9
    mu, again = model.head_.arrays(x)
    np.testing.assert_allclose(again, kappa, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(mu, axis=1), 1, rtol=1e-5)
    scores = cross_val_score(clone(model), x, y, cv=2)
    assert scores.mean() > 0.8


def test_probabilities_are_shares_of_the_pair_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    loc = torch.nn.functional.normalize(torch.randn(12, 4, generator=generator), dim=-1)
    kappa = 30 * torch.rand(12, generator=generator)
    q, known = VonMisesFisher(loc[:4], kappa[:4]), VonMisesFisher(loc[4:], kappa[4:])
    classes = torch.tensor([0, 1, 2, 2, 0, 1, 2, 2])
    found = class_probabilities(q, known, classes, 10.0)
    for i in range(4):
        total = np.zeros(3)
        for j in range(8):
            cos = (q.loc[i].double() @ known.loc[j].double()).clamp(-1, 1)
            pair = q.concentration[i].double(), known.concentration[j].double()
            total[classes[j]] += float(log_marginal(cos, *pair, 10.0, 4).exp())
        np.testing.assert_allclose(found[i], total / total.sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("y", "hint"), [(np.zeros(9), "one class"), (np.arange(9), "no two make a pair")]
)
def test_labels_without_pairs_are_named(y: np.ndarray, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        UncertaintyClassifier(**SMALL).fit(
            np.random.default_rng(0).normal(size=(9, 4)), y
        )


def test_without_scikit_learn_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from pcl.scikit import UncertaintyClassifier\n"
        "try: UncertaintyClassifier()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs scikit-learn" in done.stdout and done.returncode == 0, done.stderr
