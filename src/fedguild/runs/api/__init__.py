"""The Python API: the commands as functions. `fedguild` exports the documented names of this package.

`runs` starts and resumes runs, `comparing` compares configs (in this process, in others, or on Ray), `looking` shows
costs (`profiling`) and partitions without training.
"""
