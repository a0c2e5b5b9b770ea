"""Shared fixtures: where the project is, and the real images."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcl.images import DataError, ImageSet, load_cifar10

ROOT = Path(__file__).resolve().parent.parent


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
