"""Any device: the suite of tests/device_suite.py, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_everything_runs_on_a_device_that_is_not_the_cpu(root: Path) -> None:
    """torch's autograd counts devices at its first backward pass, so the test device has
    to be registered before any other test has made one."""
    suite = root / "tests" / "device_suite.py"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(
        words,
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
