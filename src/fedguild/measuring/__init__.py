"""Measurements of a run: the models' scores (`scores`), its costs (`costs`), and the log that holds both (`log`)."""
