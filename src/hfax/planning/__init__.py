"""Plans for machines that are not here: what fits, how fast at best, on which mesh."""
