"""Muon: orthogonalised momentum for matrices, on the ranks that own them."""
