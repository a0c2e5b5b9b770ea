"""Heads that travel: ONNX gives the same numbers, folders come back whole or are
refused, and the words on the card are those of the making."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from pcl.heads import Card, HeadError, UncertaintyHead, load_head, prepare
from pcl.sharing import export_onnx, from_pretrained, model_card, save_pretrained

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture
def head() -> UncertaintyHead:
    """A small head with a calibration that is not the identity."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = UncertaintyHead(6, dim=4, hidden=16)
        prepare(made, 3 + 2 * torch.randn(400, 6), 20.0)
    made.calibration.copy_(torch.tensor([1.7, 0.6]))
    made.card = Card(backbone="pixels", data="digits", images=9, metrics={"loss": -1})
    return made


def there(path: Path, x: torch.Tensor) -> list[np.ndarray]:
    """What onnxruntime makes of an exported head."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"features": x.numpy()})


def test_onnx_gives_the_same_numbers(tmp_path: Path, head: UncertaintyHead) -> None:
    head.train()
    export_onnx(head, tmp_path / "head.onnx")
    assert head.training, "the head itself is left alone"
    rng = torch.Generator().manual_seed(1)
    for n in (1, 3, 257):
        x = 3 + 20 * torch.randn(n, 6, generator=rng)
        mu, kappa = there(tmp_path / "head.onnx", x)
        with torch.no_grad():
            want_mu, want_kappa = head.tensors(x)
        np.testing.assert_allclose(mu, want_mu, atol=2e-6)
        np.testing.assert_allclose(kappa, want_kappa, rtol=1e-5)


def test_onnx_of_a_calibrated_head_differs_from_that_of_another(
    tmp_path: Path, head: UncertaintyHead
) -> None:
    """The two numbers of the calibration are in the graph."""
    x = torch.zeros(1, 6)
    export_onnx(head, tmp_path / "a.onnx")
    head.calibration.copy_(torch.ones(2))
    export_onnx(head, tmp_path / "b.onnx")
    a, b = (there(tmp_path / f"{name}.onnx", x)[1] for name in "ab")
    np.testing.assert_allclose(a, 1.7 * b**0.6, rtol=1e-5)


def test_a_broken_input_is_not_mended_on_the_way(
    tmp_path: Path, head: UncertaintyHead
) -> None:
    export_onnx(head, tmp_path / "head.onnx")
    _, kappa = there(tmp_path / "head.onnx", torch.full((2, 6), torch.nan))
    assert np.isnan(kappa).all()


def test_wrong_names_and_missing_packages(
    tmp_path: Path, head: UncertaintyHead, root: Path
) -> None:
    with pytest.raises(ValueError, match="must end in"):
        export_onnx(head, tmp_path / "head.pt2")
    code = """
import sys
sys.modules["onnxscript"] = None
from pcl.heads import UncertaintyHead
from pcl.sharing import export_onnx
try:
    export_onnx(UncertaintyHead(4), "head.onnx")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "writing ONNX needs onnx and onnxscript: pip install '" in done.stdout


def test_a_folder_comes_back_whole(tmp_path: Path, head: UncertaintyHead) -> None:
    folder = save_pretrained(head, tmp_path / "new" / "my-head")
    for again in (from_pretrained(folder), load_head(folder / "model.safetensors")):
        assert again.card == head.card and not again.training
        for name, value in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
    save_pretrained(head, folder)
    assert len(list(folder.iterdir())) == 4, "written again, in place"
    with pytest.raises(HeadError, match="not of 'resnet'"):
        from_pretrained(folder, backbone="resnet")
    with pytest.raises(HeadError, match="6 features"):
        from_pretrained(folder, n_features=7)


def test_what_cannot_be_used_is_refused(tmp_path: Path, head: UncertaintyHead) -> None:
    with pytest.raises(HeadError, match="nothing is downloaded"):
        from_pretrained("somebody/some-model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_pretrained(head, tmp_path / "file")
    folder = save_pretrained(head, tmp_path / "head")
    config = folder / "config.json"
    said = json.loads(config.read_text())
    for text, why in [
        (json.dumps(said | {"model_type": "bert"}), "describes 'bert'"),
        (json.dumps(said | {"sha256": "0"}), "two heads"),
        ("[]", "describes None"),
        ("{", "not JSON"),
    ]:
        config.write_text(text)
        with pytest.raises(HeadError, match=why):
            from_pretrained(folder)
    config.unlink()
    with pytest.raises(HeadError, match="cannot be read"):
        from_pretrained(folder)
    config.write_text(json.dumps(said))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(HeadError, match="checksum"):
        from_pretrained(folder)
    (folder / "model.json").unlink()
    with pytest.raises(HeadError, match="card"):
        from_pretrained(folder)


def test_the_words_are_those_of_the_card(tmp_path: Path, head: UncertaintyHead) -> None:
    folder = save_pretrained(head, tmp_path / "my-head", license="apache-2.0")
    _, front, words = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "pcl",
        "tags": ["uncertainty", "von-mises-fisher"],
        "license": "apache-2.0",
    }
    for said in (
        "# my-head",
        "Maps 6 features of pixels",
        "4-dimensional",
        "set on held-out pairs",
        "| data | digits |",
        "| loss | -1 |",
        'pcl.from_pretrained("my-head")',
    ):
        assert said in words, said
    head.calibration.copy_(torch.ones(2))
    head.card = Card(calibration_at_bound=True)
    words = (save_pretrained(head, tmp_path / "other") / "README.md").read_text()
    assert "do not read it as a probability" in words
    assert "do not rely on it" in words and "an unnamed model" in words


def test_a_name_cannot_break_the_card_or_its_front_matter() -> None:
    bad = 'x\n---\nevil: "yes" | no'
    card = {
        "calibration": [1, 1],
        "features": 6,
        "dim": 4,
        "backbone": bad,
        "data": bad,
    }
    text = model_card(card, bad, license=bad)
    _, front, _ = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == bad
    assert "\nevil" not in text.replace("\\nevil", "") and "\\| no |" in text
