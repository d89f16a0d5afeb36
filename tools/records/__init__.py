"""The papers' tables: their runs, a record for each cell, and the pages written from the records."""
