"""Numbers worked out from tensors inside chosen modules, on their device, each in a file of its own."""
