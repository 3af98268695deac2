"""Steps of a mixture of experts, beside DeepSpeed's and plain torch."""
