"""Twin GPTs in PyTorch and MindSpore with one planted difference, and whether two commands name it in their first line."""
