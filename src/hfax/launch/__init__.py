"""Multi-process runs, on one machine or many."""
