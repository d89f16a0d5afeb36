"""One run, from its config to its result, and grids of runs: `experiment` has the whole flow in one file.

`setup` assembles a run from its config. `api` is the Python API, `results` its results. `callbacks` receive the events
of a run as it goes on, and `tracking` feeds experiment trackers. `scoring` and `recording` measure every round, and
`exporting` writes a run's model in the formats of `fedguild.export`.
"""
