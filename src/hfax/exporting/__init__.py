"""Models as folders that start elsewhere: bundles of compiled programs, and portable StableHLO."""
