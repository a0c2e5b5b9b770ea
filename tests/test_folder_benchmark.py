"""A benchmark for anyone: the judgement of a folder, by labels or by crops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pcl.benchmark
from pcl.auroc import auroc, auroc_gap
from pcl.benchmark import benchmark, judge_features, page
from pcl.cli import main
from pcl.folder import Embedded
from pcl.metrics import hits_at_k


def embedded(n: int = 80, labels: bool = True, views: int = 1) -> Embedded:
    """Features of n images of eight classes, and of a crop of each."""
    rng = torch.Generator().manual_seed(0)
    kinds = torch.arange(n) % 8
    centres = torch.randn(8, 6, generator=rng)
    spread = 0.3 + torch.rand(n, 1, generator=rng)
    whole = centres[kinds] + spread * torch.randn(n, 6, generator=rng)
    crops = [whole + spread * torch.randn(n, 6, generator=rng) for _ in range(views)]
    names = [f"{i}.png" for i in range(n)]
    features = torch.stack([whole, *crops], 1)
    return Embedded(features, names, kinds if labels else None, [], "a net", {})


def test_labels_are_judged_by_the_nearest_other_image():
    data = embedded()
    found = judge_features(data)
    x = data.features[:, 0]
    right = hits_at_k(x, data.labels)
    assert found.by == "labels" and found.images == 80 and found.classes == 8
    assert found.recall == pytest.approx(float(right.double().mean()))
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    cosine = (unit @ unit.T).fill_diagonal_(-2).max(-1).values
    scores = {s.name: s for s in found.scores}
    wanted = auroc(cosine, right, data.labels)
    got = scores["neighbour-within"].r_auroc
    assert got.value == pytest.approx(wanted.value)
    assert got.error == pytest.approx(wanted.error, rel=1e-4)
    gap = auroc_gap(x.norm(dim=-1), cosine, right, data.labels)
    assert scores["feature-norm"].gap.value == pytest.approx(gap.value)
    values = [s.r_auroc.value for s in found.scores]
    assert values == sorted(values, reverse=True)
    assert any("no energy" in note for note in found.notes)


def test_crops_have_to_find_their_own_image():
    data = embedded(labels=False)
    found = judge_features(data)
    unit = torch.nn.functional.normalize(data.features.double(), dim=-1)
    answer = (unit[:, 1] @ unit[:, 0].T).argmax(-1)
    right = (answer == torch.arange(80)).double().mean()
    assert found.by == "crops" and found.classes == 0
    assert found.recall == pytest.approx(float(right))


def test_what_cannot_be_judged_is_refused_with_advice():
    with pytest.raises(ValueError, match="neither labels nor crops"):
        judge_features(embedded(labels=False, views=0))
    with pytest.raises(ValueError, match="too few"):
        judge_features(embedded(3))
    one = embedded()
    one.labels = torch.zeros(80, dtype=torch.long)
    with pytest.raises(ValueError, match="fewer than two classes"):
        judge_features(one)


def test_without_a_mistake_there_is_a_page_and_no_score():
    easy = embedded()
    easy.features = torch.eye(8)[easy.labels][:, None] + 1e-3 * easy.features[:, :1, :1]
    found = judge_features(easy)
    assert found.recall == 1 and not found.scores and not found.doubted
    assert any("two wrong answers" in note for note in found.notes)
    assert "No certainty could be judged" in page(found)


def test_a_constant_certainty_is_named_and_not_scored():
    data = embedded()
    data.features = data.features.sign()  # all of one length
    found = judge_features(data)
    assert found.scores and "feature-norm" not in {s.name for s in found.scores}
    assert any("length of the feature is the same" in note for note in found.notes)


def test_the_energy_is_judged_where_the_weights_are_known(monkeypatch):
    head = torch.nn.Linear(6, 5)
    monkeypatch.setitem(pcl.benchmark.BACKBONES, "some_net", None)
    net = SimpleNamespace(net=head)
    for name, made in (
        ("frozen_backbone", lambda name: net),
        ("imagenet_classifier", lambda name: head),
        ("fingerprint", lambda net: "0123456789abcdef"),
    ):
        monkeypatch.setattr(pcl.benchmark, name, made)
    data = embedded()
    data.timm = "1.0"
    data.backbone = "some_net@160px#0123456789ab"
    scored = {s.name for s in judge_features(data).scores}
    data.backbone = "some_net@160px#ffffffffffff"  # other weights
    found = judge_features(data)
    assert scored - {s.name for s in found.scores} == {"energy"}
    assert any("no energy" in note for note in found.notes)


def test_lone_images_and_broken_files_are_said():
    data = embedded()
    data.labels = data.labels.clone()
    data.labels[:3] = torch.tensor([20, 21, 22])
    data.broken = {"x.png": "not an image"}
    found = judge_features(data)
    assert found.images == 77
    assert any("3 images alone in a class" in note for note in found.notes)
    assert any("1 file that could not be read: x.png" in note for note in found.notes)


def test_few_mistakes_are_said():
    data = embedded(labels=False)
    data.features[5:, 1] = data.features[5:, 0]  # five crops may fail, at most
    found = judge_features(data)
    wrong = round((1 - found.recall) * 80)
    assert 2 <= wrong <= 5 and found.scores
    assert any(f"only {wrong} wrong answers" in note for note in found.notes)
    assert not any("only" in note for note in judge_features(embedded()).notes)


def test_the_page_is_whole_and_escaped():
    found = judge_features(embedded())._replace(source="<script>", notes=("a < b",))
    text = page(found)
    assert "<script" not in text and "a &lt; b" in text
    assert text.count("<tr>") == 1 + len(found.scores)
    assert f"{found.recall:.1%}" in text


def test_a_page_links_to_its_images_and_says_what_is_measured() -> None:
    found = judge_features(embedded())
    assert "<a " not in page(found)  # where the images lie is not known
    text = page(found, "my photos/2024")
    assert text.count('<a href="my%20photos/2024/') == len(found.doubted)
    for score in found.scores:
        assert text.count(pcl.benchmark.MEANING[score.name]) == 1
    assert pcl.benchmark.MEANING.keys() == pcl.benchmark.TITLES.keys()


def test_the_command_writes_a_page(tmp_path: Path, capsys):
    pytest.importorskip("pcl._torchvision")
    pytest.importorskip("timm")
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for kind in range(3):
        for i in range(6):
            path = tmp_path / "photos" / f"kind{kind}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 120, (24, 24, 3)) + 40 * kind
            image.fromarray(noise.astype(np.uint8)).save(path)
    out = tmp_path / "page.html"
    how = ["--weights", "random", "--size", "32", "--out", str(out)]
    assert main(["benchmark", str(tmp_path / "photos"), *how]) == 0
    said = capsys.readouterr().out
    assert "R@1" in said and "local margin" in said and str(out) in said
    assert out.read_text().startswith("<!doctype html>")
    assert main(["benchmark", str(tmp_path / "photos"), *how[:-1], "x.txt"]) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_another_ending_is_refused_before_anything_is_embedded(tmp_path: Path):
    with pytest.raises(ValueError, match="html"):
        benchmark(tmp_path, tmp_path / "page.txt")
