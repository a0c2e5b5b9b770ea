"""Kernels that start at once. Each page still has a process of its own, and nothing of the
project is loaded in it: it is forked from one that has imported the packages which nearly
every page imports, and that are most of a short page's time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import types
from functools import cache
from typing import Any

from jupyter_client.provisioning import local_provisioner

# Without pyplot and its inline backend, which look for a kernel around them. The
# compiler is what torch loads with a first optimiser.
PRELOAD = (
    *("ipykernel.kernelapp", "ipykernel.ipkernel", "IPython.core.pylabtools"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
    *("numpy", "scipy.optimize", "scipy.stats", "torch", "torch._dynamo"),
)
# Matplotlib reads it when it is imported; a kernel would set it too late.
BACKEND = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


class ForkedKernel:
    """What Jupyter needs of a kernel's process, as `subprocess.Popen` has it."""

    stdin = stdout = stderr = None

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, once it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("kernel", timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """As `os.kill`."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.terminate()

    def kill(self) -> None:
        """End it."""
        self.process.kill()


def serve(
    command: list[str],  # what Jupyter would have run
    folder: str | None,  # where
    environment: dict[str, str],
    path: list[str],  # where Python looks for modules
    ready: Any,  # a connection: told once the process has a group of its own
) -> None:
    """Be the kernel of one page."""
    os.setsid()
    ready.send(True)
    ready.close()
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    sys.path[:] = path  # Sphinx has added to its own
    from ipykernel.kernelapp import IPKernelApp

    arguments = command[command.index("ipykernel_launcher") + 1 :]
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # it ends with its parent
    quiet = "--IPKernelApp.log_level=40"  # its errors only: the build has this terminal
    IPKernelApp.launch_instance(argv=[*arguments, parent, quiet])


@cache
def fresh_path() -> list[str]:
    """Where a Python that has just started looks for modules, besides its folder."""
    words = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep=chr(0))"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return found.removesuffix("\n").split("\0")


def fork_kernel(command: list[str], **options: Any) -> Any:
    """Stand in for Jupyter's `launch_kernel`, where the kernel is this Python's."""
    if "ipykernel_launcher" not in command:
        return start_process(command, **options)
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    environment = dict(options.get("env") or os.environ)
    words = command, options.get("cwd"), environment, fresh_path(), there
    process = context.Process(target=serve, args=words)
    process.start()
    there.close()
    here.recv()  # its group is its own, so signals reach no other
    here.close()
    return ForkedKernel(process)


start_process = local_provisioner.launch_kernel


def fork_kernels() -> None:
    """From now on, fork the kernels that this process starts; where there is no fork,
    start them as ever."""
    if not sys.platform.startswith("linux"):
        return
    # A child imports the script that is being run, if there is one: here it is Sphinx.
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(BACKEND)
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    local_provisioner.launch_kernel = fork_kernel
