"""Two dumps of one model whose ranks split it differently: the shards of each tensor are joined, one tensor at a time."""
