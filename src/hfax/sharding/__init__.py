"""Models over many devices: which mesh, which weight is split how, and where every array lies."""
