"""The taps of MindSpore in PyNative mode."""
