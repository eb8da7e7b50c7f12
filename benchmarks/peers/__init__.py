"""Other engines on the same prompts, the same weights and the same machine (``python -m benchmarks.peers``)."""
