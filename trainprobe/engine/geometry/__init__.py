"""Where parts of a tensor lie in the whole: rectangles, shards of a process, and rows of fused matrices."""
