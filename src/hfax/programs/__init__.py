"""Compiled programs, whatever they compute: sizes, cache keys and storage."""
