"""Runs of several processes, on one machine or many."""
