"""Two dumps of one model whose modules have other names, or are fused on one side: which belongs to which."""
