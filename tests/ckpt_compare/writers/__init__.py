"""Scripts that write real checkpoints, one process a rank, and the launcher that runs them."""
