"""The engine, its optimizer and its parameters as clients of DeepSpeed see them."""
