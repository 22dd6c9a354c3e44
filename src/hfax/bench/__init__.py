"""`hfax bench`: how fast a model loads, compiles and writes here, beside the machine's limits and what else a user could run.

Every subject (hfax in some form, or a peer) lives in a process of its own, and the subjects take turns, measurement by measurement,
so that a machine whose speed changes from minute to minute changes for all of them.
"""
