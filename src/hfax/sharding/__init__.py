"""Sharding models over several devices: the mesh, the plan for each weight, and the placement of arrays."""
