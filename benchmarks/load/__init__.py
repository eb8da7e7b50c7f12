"""Load on a running server: a lean client, the server under test with a switch for its arms, slices, a soak."""
