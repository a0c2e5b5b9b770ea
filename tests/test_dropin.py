"""The losses inside other people's loops: plain PyTorch, Lightning, and beside
pytorch-metric-learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pcl._torchvision  # noqa: F401  what follows imports torchvision, which needs this beside a CPU torch
from pcl.encoders import mlp_encoder
from pcl.losses import ExactInfoNCE, MCInfoNCE
from pcl.vmf import VonMisesFisher

CLASSES, FEATURES, DIM = 6, 12, 5


def labelled(n: int = 192, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy points around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.arange(n) % CLASSES
    return centres[labels] + 0.7 * torch.randn(n, FEATURES, generator=generator), labels


def pairs(n: int = 192) -> TensorDataset:
    """Two noisy views of each point."""
    x, _ = labelled(n)
    noise = torch.randn(2, n, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x + 0.3 * noise[0], x + 0.3 * noise[1])


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Means over the first and the last quarter: single values of a sampled loss are
    noisy."""
    quarter = len(values) // 4
    return sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter


def test_in_a_plain_loop() -> None:
    """Nothing but torch: a module, an optimiser, a data loader."""
    torch.manual_seed(0)
    net, loss = (
        nn.Linear(FEATURES, DIM + 1),
        MCInfoNCE(kappa_pos=20.0, n_samples=16, learn_kappa_pos=True),
    )
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=1e-2)
    seen = []
    for _ in range(8):
        for x, x_pos in DataLoader(pairs(), batch_size=32, shuffle=True):
            q, q_pos = (
                VonMisesFisher(
                    nn.functional.normalize(out[:, :DIM], dim=-1), 1 + out[:, DIM].exp()
                )
                for out in (net(x), net(x_pos))
            )
            value = loss(q, q_pos)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seen.append(value.item())
    start, end = first_and_last(seen)
    assert end < start - 0.3
    assert loss.kappa_pos.item() != 20.0, (
        "the loss's own parameter learns with the rest"
    )
    assert f"kappa_pos={loss.kappa_pos.item():g}" in repr(loss)
    copy = MCInfoNCE(kappa_pos=1.0, n_samples=16, learn_kappa_pos=True)
    copy.load_state_dict(loss.state_dict())
    assert copy.kappa_pos.equal(loss.kappa_pos), (
        "and is saved and loaded like any other"
    )


# --- Lightning
# -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*isinstance.treespec.*"
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    lightning = pytest.importorskip(
        "pytorch_lightning",
        reason="Lightning is not installed: pip install -e '.[dev]'",
    )

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = mlp_encoder(FEATURES, DIM, [16], shared=True)
            self.loss = MCInfoNCE(kappa_pos=20.0, n_samples=16)
            self.seen: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            value = self.loss(self.encoder(batch[0]), self.encoder(batch[1]))
            assert value.dtype == torch.float32
            self.log("loss", value)
            self.seen.append(value.item())
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    monkeypatch.chdir(tmp_path)
    lightning.seed_everything(0, verbose=False)
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=8, precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, DataLoader(pairs(), batch_size=32, shuffle=True))
    start, end = first_and_last(model.seen)
    assert trainer.global_step == 48 == len(model.seen) and end < start - 0.3
    assert not any(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    ), "every weight learns"
    assert list(tmp_path.iterdir()) == [], "nothing is left on the disk"


# --- pytorch-metric-learning
# -----------------------------------------------------------------------------------------


def row(q: VonMisesFisher, index: Tensor) -> VonMisesFisher:
    """Some of the posteriors, by their numbers."""
    return VonMisesFisher(q.loc[index], q.concentration[index])


def metric_learning(part: str):
    name = f"pytorch_metric_learning.{part}"
    return pytest.importorskip(
        name, reason="pytorch-metric-learning is not installed: pip install -e '.[dev]'"
    )


def test_with_a_sampler_of_metric_learning() -> None:
    """MPerClassSampler with m = 2 puts the two members of a pair next to each other:
    even rows, odd rows."""
    samplers = metric_learning("samplers")
    x, labels = labelled()
    sampler = samplers.MPerClassSampler(
        labels, m=2, batch_size=2 * CLASSES, length_before_new_iter=len(x)
    )
    loader = DataLoader(
        TensorDataset(x, labels), batch_size=2 * CLASSES, sampler=sampler
    )
    torch.manual_seed(0)
    encoder, loss = (
        mlp_encoder(FEATURES, DIM, [16], shared=True),
        MCInfoNCE(kappa_pos=20.0, n_samples=16),
    )
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    seen = []
    for _ in range(4):
        for batch, classes in loader:
            assert (
                classes[::2].equal(classes[1::2])
                and len(set(classes[::2].tolist())) == CLASSES
            )
            q = encoder(batch)
            even = torch.arange(0, len(batch), 2)
            value = loss(
                row(q, even), row(q, even + 1)
            )  # negatives: the pairs of all other classes
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seen.append(value.item())
    start, end = first_and_last(seen)
    assert end < start - 0.3


@pytest.mark.parametrize(
    "make", [lambda: MCInfoNCE(20.0, 16), lambda: ExactInfoNCE(20.0)]
)
def test_with_triplets_of_a_miner(make) -> None:
    """A triplet miner's (anchors, positives, negatives) are the rows of q, q_pos and
    q_neg, one negative each."""
    miners = metric_learning("miners")
    x, labels = labelled(48)
    torch.manual_seed(0)
    encoder = mlp_encoder(FEATURES, DIM, [16], shared=True)
    q = encoder(x)
    anchors, positives, negatives = miners.TripletMarginMiner(
        margin=0.2, type_of_triplets="all"
    )(q.loc, labels)
    assert len(anchors) > 48 and labels[anchors].equal(labels[positives])
    assert (labels[anchors] != labels[negatives]).all()
    value = make()(row(q, anchors), row(q, positives), row(q, negatives[:, None]))
    value.backward()
    assert value.isfinite() and all(
        p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters()
    )


def test_with_pairs_of_a_miner() -> None:
    """A pair miner's two lists: each positive pair gets the negatives that were mined
    for its anchor."""
    miners = metric_learning("miners")
    x, labels = labelled(36)
    torch.manual_seed(0)
    q = mlp_encoder(FEATURES, DIM, [16], shared=True)(x)
    mined = miners.MultiSimilarityMiner(epsilon=0.5)(q.loc, labels)
    anchors, positives, anchors_neg, negatives = mined
    total, rows = torch.zeros(()), 0
    loss = ExactInfoNCE(20.0, reduction="sum")
    for anchor in anchors.unique().tolist():
        own, others = positives[anchors == anchor], negatives[anchors_neg == anchor]
        if len(others):
            total = total + loss(
                row(q, torch.full_like(own, anchor)), row(q, own), row(q, others[None])
            )
            rows += len(own)
    assert rows > 0
    total.backward()
    one = anchors[0]
    by_hand = loss(
        row(q, one[None]),
        row(q, positives[:1]),
        row(q, negatives[anchors_neg == one][None]),
    )
    repeated = loss(
        row(q, one.repeat(3)),
        row(q, positives[:1].repeat(3)),
        row(q, negatives[anchors_neg == one][None]),
    )
    torch.testing.assert_close(repeated, 3 * by_hand, rtol=1e-5, atol=1e-5)
