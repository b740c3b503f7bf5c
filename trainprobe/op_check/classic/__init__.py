"""Commands and files of mindstudio-probe's accuracy check, for scripts that use them."""
