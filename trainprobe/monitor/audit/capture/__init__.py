"""What the relations of the audit need to know of a step: one tap, and a file for each kind of fact."""
