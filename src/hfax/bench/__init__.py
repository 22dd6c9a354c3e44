"""`hfax bench`: benchmarks loading, compilation and generation against the machine's limits and other implementations.

Every subject (an hfax configuration, or a peer) runs in its own process. Measurements are interleaved between subjects, so changes
in machine speed affect all of them.
"""
