"""Stage 7 of 9: evaluation. Scores of the trained models.

`tasks.evaluate` scores examples for every slot of a model at once; `metrics` holds the metrics of
generated answers.
"""
