"""A frozen backbone from transformers, shared by the slots of a cohort."""
