"""Training of the packaged model `english` from a folder of text, and what fine-tuning it reaches."""
