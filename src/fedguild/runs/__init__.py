"""A run's folder: `log` holds its records, `activity` its events; `folder` reads one run, `index` a line of many."""
