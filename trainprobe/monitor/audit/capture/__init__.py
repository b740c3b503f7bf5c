"""The taps of the audit for each framework, and what its observers share."""
