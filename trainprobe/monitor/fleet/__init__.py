"""A whole fleet's run log at once: thousands of ranks, read through DuckDB, on one machine or over a Ray cluster.

catalog.py    which ranks there are, where each stands, which steps each has
groups.py     which ranks are replicas of each other, and how they are shared out
rows.sql.py   the queries
examine.py    what one share of the ranks shows: who differs, what is not finite, scalars
survey.py     the shares, one after the other or on Ray
verdict.py    findings about the fleet
page.py       the page of `trainprobe report --fleet`
"""
