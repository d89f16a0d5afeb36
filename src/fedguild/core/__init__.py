"""Foundations of every other package: payloads and their codec, files, errors, seeds, names, plug-ins and progress."""
