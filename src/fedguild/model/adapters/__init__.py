"""Adapters on the slot axis: every trainable tensor holds one slice per client of a cohort."""
