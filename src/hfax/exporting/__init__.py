"""Model exports: bundles of compiled programs, and portable StableHLO."""
