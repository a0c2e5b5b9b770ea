"""The losses inside other people's loops: plain PyTorch, Lightning, and beside
pytorch-metric-learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pcl._torchvision  # noqa: F401  what follows imports torchvision, which needs this beside a CPU torch
from pcl.encoders import NormEncoder, mlp_encoder
from pcl.labelled import FromLabels, TwoViews, as_posterior, rows_of
from pcl.losses import HIB, ExactInfoNCE, InfoNCE, MCInfoNCE, make_loss
from pcl.networks import mlp
from pcl.objectives import ByLabel
from pcl.training import Config, Epochs, train
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


# --- losses by label
# -------------------------------------------------------------------------------------------------


def by_hand(loss: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor]:
    """The definition in loops: one value for each pair of equal labels."""
    q, values = as_posterior(x), []
    for a in range(len(x)):
        others = [n for n in range(len(x)) if labels[n] != labels[a]]
        for p in range(len(x)):
            if p != a and labels[p] == labels[a] and others:
                negatives = torch.tensor([others])
                rows = row(q, torch.tensor([a])), row(q, torch.tensor([p]))
                values.append(loss(*rows, row(q, negatives)))
    return values


UNEVEN = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])


@pytest.mark.parametrize("name", ["infonce", "exact-infonce", "exact-nwj", "elk"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_by_label_is_the_mean_over_pairs_of_equal_labels(
    name: str, reduction: str
) -> None:
    x = 3 * torch.randn(
        9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    x.requires_grad_()
    loss = make_loss(name, kappa_pos=5.0, reduction=reduction)
    found = FromLabels(loss)(x, UNEVEN)
    each = torch.stack(by_hand(make_loss(name, kappa_pos=5.0), x, UNEVEN))
    if reduction == "none":  # in the order of the number of negatives
        torch.testing.assert_close(found.sort()[0], each.sort()[0])
    else:
        torch.testing.assert_close(found, getattr(each, reduction)())
    grads = [
        torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (found, each)
    ]
    scale = len(each) if reduction == "mean" else 1
    torch.testing.assert_close(grads[0] * scale, grads[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "make", [lambda: MCInfoNCE(5.0, 64), lambda: HIB(5.0, 0.0, 64)]
)
def test_losses_that_draw_agree_by_label_too(make) -> None:
    """Both sides are random; their means over repetitions agree within four standard
    errors."""
    x = 3 * torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    labels, loss = torch.tensor([0, 0, 0, 1, 1, 2, 2]), make()
    torch.manual_seed(0)
    ours = torch.stack([FromLabels(loss)(x, labels) for _ in range(60)])
    loops = torch.stack(
        [torch.stack(by_hand(loss, x, labels)).mean() for _ in range(60)]
    )
    error = ((ours.var() + loops.var()) / 60).sqrt()
    assert abs(ours.mean() - loops.mean()) < 4 * error


def test_by_label_infonce_is_ntxent_of_metric_learning() -> None:
    """Up to the logarithm of the number of negatives, which is in our formula."""
    losses = metric_learning("losses")
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 3
    theirs = losses.NTXentLoss(temperature=0.1)(x, labels)
    ours = FromLabels(InfoNCE(temperature=0.1))(x, labels)
    torch.testing.assert_close(ours, theirs - torch.tensor(8.0).log())


def test_mined_triplets_and_pairs_are_taken_as_they_come() -> None:
    miners = metric_learning("miners")
    x, labels = labelled(48)
    torch.manual_seed(0)
    encoder = NormEncoder(mlp([FEATURES, 16, DIM]))
    loss = FromLabels(ExactInfoNCE(20.0))
    for miner in (
        miners.TripletMarginMiner(margin=0.2, type_of_triplets="all"),
        miners.MultiSimilarityMiner(epsilon=0.5),
    ):
        q = encoder(x)
        mined = miner(q.loc, labels)
        value = loss(q, labels, mined)
        negatives = mined[-1]
        anchors_neg = mined[0] if len(mined) == 3 else mined[2]
        pairs = set(zip(mined[0].tolist(), mined[1].tolist(), strict=True))
        each = []
        for a, p in sorted(pairs):
            others = negatives[anchors_neg == a].unique()
            if len(others):
                each.append(
                    loss.loss(
                        row(q, torch.tensor([a])),
                        row(q, torch.tensor([p])),
                        row(q, others[None]),
                    )
                )
        torch.testing.assert_close(
            value, torch.stack(each).mean(), rtol=1e-4, atol=1e-5
        )
        value.backward()
    nothing = loss(encoder(x), labels, [torch.zeros(0, dtype=torch.long)] * 3)
    assert nothing.item() == 0 and nothing.requires_grad
    with pytest.raises(ValueError, match="indices_tuple"):
        loss(encoder(x), labels, (labels, labels))


def test_candidates_may_come_from_elsewhere() -> None:
    """As ref_emb, the way pytorch-metric-learning calls it."""
    x, labels = labelled(48)
    torch.manual_seed(0)
    net = mlp([FEATURES, 16, DIM])
    q, r = as_posterior(net(x)), as_posterior(net(x[:20]))
    refs = FromLabels(ExactInfoNCE(20.0))(q, labels, ref_emb=r, ref_labels=labels[:20])
    same = labels[:, None] == labels[:20]
    by_rows = [
        ExactInfoNCE(20.0, reduction="sum")(
            row(q, rows.anchor), row(r, rows.positive), row(r, rows.negatives)
        )
        for rows in rows_of(same, ~same)
    ]
    torch.testing.assert_close(refs, sum(by_rows) / same.sum(), rtol=1e-4, atol=1e-5)


def test_by_label_trains_with_a_sampler_of_metric_learning() -> None:
    samplers = metric_learning("samplers")
    x, labels = labelled()
    sampler = samplers.MPerClassSampler(
        labels, m=4, batch_size=4 * CLASSES, length_before_new_iter=len(x)
    )
    loader = DataLoader(
        TensorDataset(x, labels), batch_size=4 * CLASSES, sampler=sampler
    )
    torch.manual_seed(0)
    net, loss, seen = mlp([FEATURES, 16, DIM]), FromLabels(ExactInfoNCE(20.0)), []
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(4):
        for batch, classes in loader:
            value = loss(net(batch), classes)  # raw embeddings: the length is kappa
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seen.append(value.item())
    start, end = first_and_last(seen)
    assert end < start - 0.3


def test_by_label_is_an_objective_of_the_loop() -> None:
    x, labels = labelled()
    torch.manual_seed(0)
    encoder = NormEncoder(mlp([FEATURES, 16, DIM]))
    objective = ByLabel(encoder, FromLabels(ExactInfoNCE(20.0, learn_kappa_pos=True)))
    config = Config(steps=40, batch_size=48, lr_mu=1e-2, kappa_from=0.0, log_every=10)
    losses = train(objective, Epochs(x, labels), config).curve["loss"]
    assert losses[-1] < losses[0] - 0.3
    assert objective.groups()["loss"]


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*isinstance.treespec.*"
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_by_label_and_two_views_in_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp([FEATURES, 16, DIM])
            self.by_label = FromLabels(ExactInfoNCE(temperature=0.05), gather=True)
            self.views = TwoViews(ExactInfoNCE(temperature=0.05), gather=True)
            self.seen: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, labels = batch
            noisy = (self.net(x + 0.1 * torch.randn_like(x)) for _ in range(2))
            value = self.by_label(self.net(x), labels) + self.views(*noisy)
            assert value.dtype == torch.float32
            self.seen.append(value.item())
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    monkeypatch.chdir(tmp_path)
    lightning.seed_everything(0, verbose=False)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=8, precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(*labelled()), batch_size=48))
    start, end = first_and_last(model.seen)
    assert end < start - 0.3


def test_two_views_are_symmetric_and_have_the_negatives_of_simclr() -> None:
    losses = metric_learning("losses")
    views = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    number = torch.arange(6).repeat(2)
    theirs = losses.NTXentLoss(temperature=0.2)(views.flatten(0, 1), number)
    ours = TwoViews(InfoNCE(temperature=0.2))(*views)
    torch.testing.assert_close(ours, theirs - torch.tensor(10.0).log())
    exact = TwoViews(ExactInfoNCE(5.0), within=False)
    torch.testing.assert_close(exact(*views), exact(*views.flip(0)))
    a, b = (as_posterior(view) for view in views)
    one_way = ExactInfoNCE(5.0)
    torch.testing.assert_close(exact(*views), (one_way(a, b) + one_way(b, a)) / 2)
    with pytest.raises(ValueError, match="one image"):
        TwoViews(ExactInfoNCE(5.0))(views[0, :1], views[1, :1])
    with pytest.raises(ValueError, match="6 rows and second 5"):
        TwoViews(ExactInfoNCE(5.0))(views[0], views[1, :5])


@pytest.mark.parametrize(
    ("call", "error", "hint"),
    [
        (lambda f, x, y: f(x, None), TypeError, "give labels"),
        (lambda f, x, y: f(x, y[:3]), ValueError, r"shape \(9,\)"),
        (lambda f, x, y: f(x, y.float()), TypeError, "whole numbers"),
        (lambda f, x, y: f(x, torch.arange(9)), ValueError, "share a label"),
        (lambda f, x, y: f(x, torch.zeros(9, dtype=int)), ValueError, "share a label"),
        (lambda f, x, y: f(x[0], y), TypeError, "embeddings must be"),
        (lambda f, x, y: f(x, y, ref_emb=x), TypeError, "ref_labels"),
        (
            lambda f, x, y: f(nn.functional.normalize(x, dim=-1), y),
            ValueError,
            "length 1",
        ),
    ],
)
def test_slips_by_label_are_named(call, error: type[Exception], hint: str) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(error, match=hint):
        call(FromLabels(ExactInfoNCE(5.0)), x, UNEVEN)


def test_temperature_is_another_word_for_the_inverse_of_kappa_pos() -> None:
    for name in ("infonce", "mcinfonce", "exact-infonce", "exact-nwj", "elk"):
        assert float(make_loss(name, temperature=0.05).kappa_pos) == 20.0
    for wrong in ({}, {"kappa_pos": 20.0, "temperature": 0.05}):
        with pytest.raises(TypeError, match="temperature = 1 / kappa_pos"):
            ExactInfoNCE(**wrong)
    with pytest.raises(ValueError, match="temperature must be a positive"):
        MCInfoNCE(temperature=0.0)


def two_processes(rank: int, folder: str) -> None:
    """What one of two processes finds: its loss, and the gradients of its weights."""
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    net = nn.Linear(3, 4, dtype=torch.float64)
    x = torch.randn(12, 3, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 1, 1, 2, 2, 2, 0])
    mine = slice(6 * rank, 6 * rank + 6)
    found = []
    for value in (
        FromLabels(ExactInfoNCE(5.0), gather=True)(net(x[mine]), labels[mine]),
        TwoViews(ExactInfoNCE(5.0), gather=True)(net(x[mine]), net(x[mine] + 0.1)),
    ):
        grad = torch.autograd.grad(value, net.weight)[0]
        torch.distributed.all_reduce(grad)
        found += [value.detach(), grad / 2]  # as DDP averages them
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_find_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    """With unequal numbers of pairs on the two."""
    torch.multiprocessing.spawn(two_processes, (str(tmp_path),), 2)
    ours = [torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1)]
    torch.manual_seed(0)
    net = nn.Linear(3, 4, dtype=torch.float64)
    x = torch.randn(12, 3, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 0, 1, 2, 1, 1, 2, 2, 2, 0])
    whole = (
        FromLabels(ExactInfoNCE(5.0))(net(x), labels),
        TwoViews(ExactInfoNCE(5.0))(net(x), net(x + 0.1)),
    )
    for i, value in enumerate(whole):
        mean = (ours[0][2 * i] + ours[1][2 * i]) / 2
        torch.testing.assert_close(mean, value.detach(), rtol=1e-10, atol=1e-12)
        grad = torch.autograd.grad(value, net.weight)[0]
        for one in ours:
            torch.testing.assert_close(one[2 * i + 1], grad, rtol=1e-8, atol=1e-10)
