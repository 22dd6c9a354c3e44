"""Compiled programs, whatever they compute: their sizes, their keys, and where they are kept."""
