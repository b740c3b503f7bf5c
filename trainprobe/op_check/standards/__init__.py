"""The six standards of mindstudio-probe's accuracy check, for those who must report them."""
