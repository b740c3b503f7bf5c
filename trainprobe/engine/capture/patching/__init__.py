"""How taps get between a program and its libraries, and how everything is put back."""
