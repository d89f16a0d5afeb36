"""Stage 3 of 8: model. A frozen backbone from transformers, shared by the slots of a cohort."""
