"""Long-running test programmes, each a command: `python -m tests.programmes.<name>`; CI runs them with small counts."""
