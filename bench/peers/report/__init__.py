"""Make docs/BENCHMARKS.md and its plots from saved results."""
