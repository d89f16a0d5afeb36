"""Stage 3 of 9: model. A frozen backbone from transformers, shared by the slots of a cohort."""
