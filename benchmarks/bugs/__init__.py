"""Silent bugs of training stacks, re-created in small real runs on two gloo ranks, each with a healthy twin."""
