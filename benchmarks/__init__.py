"""What is measured, and how well it works; a package of its own, as others are called `benchmarks`, too."""
