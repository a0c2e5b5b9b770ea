"""The torchvision remedy: it mends a broken import, and leaves a working one alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

# Asked without importing it: beside a CPU torch that import is the very thing that
# fails.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None,
    reason="the images extra is not installed; make test installs it",
)


def python(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_and_timm_import_after_it() -> None:
    code = """
import torch, pcl._torchvision, torchvision, timm
from torchvision.transforms import v2
assert v2.CenterCrop(2)(torch.zeros(3, 4, 4)).shape == (3, 2, 2)
assert timm.create_model("resnet10t", pretrained=False, num_classes=0).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 512)
"""
    python(code)


BOTH_WAYS = """
import torch
def load(path):
    {body}
torch.ops.load_library = load
import pcl._torchvision as remedy
defined = "torchvision::nms" in torch._C._dispatch_get_all_op_names()
print(remedy._library is not None, defined)
"""


def test_it_does_nothing_where_the_extension_loads() -> None:
    assert python(BOTH_WAYS.format(body="pass")) == "False False"


def test_it_declares_the_operators_where_the_extension_does_not_load() -> None:
    assert (
        python(BOTH_WAYS.format(body="raise OSError('libcudart.so is missing')"))
        == "True True"
    )
