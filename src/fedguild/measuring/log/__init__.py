"""A run's folder: `records` are its lines, `activity` its events; `folder` reads one run, `index` a line of many."""
