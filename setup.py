"""The chapters and the ledger travel inside the package; everything else is in pyproject.toml.

They lie beside the package in a checkout. A mapping of folders in pyproject.toml would do the same, but then an
editable install finds `pcl` through a hook that type checkers and editors do not see.
"""

from collections.abc import Iterator
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# folder here, folder inside the package, files
TRAVELLING = (
    ("nbs", "notebooks", ("*.ipynb",)),
    ("results", "results", ("published/*.toml", "*/*.json")),
)


class BuildWithChapters(build_py):
    """Copies the chapters and the records beside the modules, unless the install is editable."""

    def travelling(self) -> Iterator[tuple[Path, Path]]:
        """Each file, and where it goes."""
        inside = Path(self.build_lib) / "pcl"
        for here, there, patterns in TRAVELLING:
            for pattern in patterns:
                for path in sorted(Path(here).glob(pattern)):
                    yield path, inside / there / path.relative_to(here)

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for path, target in self.travelling():
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        found = super().get_outputs(include_bytecode)
        return found + [str(target) for _, target in self.travelling()]


setup(cmdclass={"build_py": BuildWithChapters})
