"""Mixture-of-experts layers: one view of every family's router and experts."""
