"""The same step once more under another condition: is it the same, rounding, or not, and where first?

`conditions/` has a file for each condition. They share what follows.

- Recording: `recording` keeps what a step showed in memory, `golden_record` as text, `pack` whole tensors.
- Running: `step_again` runs a step of a training once more (`model_calls`), `script_runs` a whole script, `rebuild` a call of a
  pack, `graph_beginning` a graph that is compiled in part.
- Comparing: `first_place` finds where two runs first differ, `floors` tells rounding from the rest.
- Verdict and page: `comparison/answers.py`.

`why/` asks what is wrong with a run, of all that it left on disk.
"""
