"""Silent bugs that one run's own record could show, each with a healthy twin, under the default plan of the README."""
