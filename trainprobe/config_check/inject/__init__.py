"""What `collect -- COMMAND` puts into a program that it starts."""
