"""Frozen weights in 4 or 8 bits (QLoRA; Dettmers et al. 2023), and layers that compute with them."""
