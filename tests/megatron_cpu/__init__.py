"""Megatron-core on a CPU, for tests alone: a shim that answers for the missing device, and a tiny GPT in any layout."""
