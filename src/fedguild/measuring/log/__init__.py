"""A run's folder: `records` and `activity` are its logs; `folder` reads one run, `index` a line for each of many."""
