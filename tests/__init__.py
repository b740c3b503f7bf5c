"""The tests, one folder an area, mirroring the package."""
