"""One training script in several layouts, a step of each dumped and compared with all others."""
