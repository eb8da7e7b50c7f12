"""Long measurements of Outrider: run them from the repository's root, ``python -m benchmarks.engine_speed --help``."""
