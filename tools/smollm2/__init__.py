"""SmolLM2-135M-Instruct from the package index, and a mixture of experts made from it."""
