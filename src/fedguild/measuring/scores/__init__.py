"""Scores of the trained models.

`tasks.evaluate` scores examples for every slot of a model at once; `metrics` holds the metrics of
generated answers.
"""
