"""The Python API: what the commands do, as functions. `fedguild` exports the documented names of this package.

`runs` starts and resumes runs, `comparing` compares configs (its cells run here, in processes, or on Ray), `looking`
shows costs (`profiling`) and partitions without training.
"""
