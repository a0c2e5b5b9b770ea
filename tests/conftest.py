"""Shared fixtures: where the project is, the real images, an address on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from torch.distributions import Distribution

from pcl.catalogue.cifar10 import load_cifar10
from pcl.datasets import DataError, ImageSet

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def checked_parameters() -> Iterator[None]:
    """A compilation that fails leaves torch's checks off; the next test has them on."""
    yield
    Distribution.set_default_validate_args(True)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def cifar10() -> ImageSet:
    """CIFAR-10's test images, fetched once into the user's cache."""
    try:
        return load_cifar10("test")
    except DataError as error:
        pytest.skip(f"CIFAR-10 cannot be had here: {error}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An address on this machine, and the folder it serves."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/", folder
    httpd.shutdown()
    httpd.server_close()
