"""What the library costs, measured side by side with what one would do without it: `python -m tests.benchmarks`."""
