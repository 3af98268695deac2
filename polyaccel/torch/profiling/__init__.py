"""Operations, times and shares of a torch module."""
