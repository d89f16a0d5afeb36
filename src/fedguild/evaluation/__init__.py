"""Stage 7 of 8: evaluation. What the trained models are worth, and what they cost.

`tasks.evaluate` scores examples for every slot of a model at once; `metrics` holds the metrics of
generated answers; `profile` counts parameters, FLOPs and memory from a model's shape alone.
"""
