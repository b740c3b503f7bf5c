"""How well the same step a second time answers: planted faults, each with a healthy twin."""
