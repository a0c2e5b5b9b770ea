"""Run every benchmark: `make bench`."""

from benchmarks import bench_bessel, bench_kernels, bench_losses, bench_vmf
from benchmarks.timing import show

for module in (bench_bessel, bench_vmf, bench_kernels, bench_losses):
    print(f"\n{module.__doc__.splitlines()[0]}")
    show(module.rows())
